"""Cross-entropy over one row: logits have the dtype of the pointer, and a run-time branch casts them to fp32."""

import triton
import triton.language as tl


@triton.jit
def kernel(logits_ptr, lse_ptr, scale, do_scale, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    logits = tl.load(logits_ptr + row * n_cols + cols, mask=mask, other=-float("inf"))
    if do_scale != 0:
        logits = scale * logits.to(tl.float32)
    z = logits.to(tl.float32)
    m = tl.max(z, 0)
    tl.store(lse_ptr + row, m + tl.log(tl.sum(tl.exp(z - m), 0)))


MATRIX = {
    name: {"logits_ptr": f"*{name}", "lse_ptr": "*fp32", "scale": "fp32", "do_scale": "i32", "n_cols": "i32"}
    for name in ("fp32", "fp16", "bf16")
}
CONSTEXPRS = {"BLOCK": 256}
TARGETS = ["sm_90"]


def build():
    return kernel, [(name, "sm_90") for name in MATRIX]
