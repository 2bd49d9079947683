"""A PTX interpreter: the code that nvcc emits for a kernel, executed on the CPU, thread by thread of each warp.

parse.py reads the text, arithmetic.py, memory.py and tensor_core.py execute the instructions on NumPy arrays with one
element a thread, machine.py schedules warps and barriers, device.py is the CUDA runtime that the compiled host code
launches kernels through. Whatever form of an instruction is not listed is refused by name before the kernel runs.
"""
