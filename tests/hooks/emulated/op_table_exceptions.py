"""Which operators of LibTorch's table emu does not run as the CPU does, and why.

Kinds: "refused" (emu raises where the CPU does not), "bits" (emu computes other bits than the CPU),
"offload" (offload changes bits), "unrepeatable" (may give other bits each time, on the CPU as well),
"untested" (every sample raises on the CPU). op_table.py fails for an operator that is not here, and
for one that need not be here ("unrepeatable" ones excepted).
"""

ALL = ("float32", "float64", "complex128", "bfloat16")

EXCEPTIONS = {
    # name: (kind, dtypes, reason)
    "sparse.mm.reduce": ("refused", ("float32", "float64", "bfloat16"), "emu has dense tensors only"),
    "sparse.sampled_addmm": ("refused", ("float32", "float64", "complex128"), "emu has dense tensors only"),
    "linalg.lstsq": ("unrepeatable", ALL, "LAPACK's gelsy"),
    "linalg.lstsq.grad_oriented": ("unrepeatable", ALL, "LAPACK's gelsy"),
    "nn.functional.conv_transpose3d": ("unrepeatable", ("bfloat16",), "oneDNN's second derivative where there is AMX"),
    "to_sparse": ("refused", ALL, "emu has dense tensors only"),
    "tensor_split": ("refused", ALL, "indices must be on the CPU, as with CUDA; the table moves them"),
}


def kind_of(operator, dtype):
    kind, dtypes, _ = EXCEPTIONS.get(operator, (None, (), None))
    return kind if dtype in dtypes else None
