"""`torch.distributed` on the device: a process group whose collectives are recorded like any other op."""
