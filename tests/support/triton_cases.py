"""Compilation of Triton kernels for a GPU that is not there."""

import subprocess


def compile_for_h100(kernel, warps, constants, pointers, scalars, other="*fp32"):
    """Return what ptxas says about the kernel's sm_90a code.

    Args:
        pointers, scalars: types of arguments by name; `other` is the type of all other arguments.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else scalars.get(name) or pointers.get(name, other) for name in names
    }
    # As at a launch: addresses of tensors, and a number of columns, are multiples of 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*" or n == "columns"}
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "-"]
    return subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True, timeout=120)
