"""As what does it run? Turns a graph into kernels and ATen calls. Imports `ir_nodes` only."""
