"""What Adam computes on flat planes: the kernels in C, their arguments, and CPUAdam over them."""
