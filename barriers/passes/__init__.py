"""Passes over a graph, one a file; `barriers.pipeline` lists them in order. Imports `ir_nodes` only."""
