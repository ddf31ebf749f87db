"""The definition, in float64 and one query head at a time."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def verify_attention_reference(
    q: Float[Tensor, "T Hq D"],
    k: Float[Tensor, "Hkv S D"],
    v: Float[Tensor, "Hkv S D"],
    blocked: Bool[Tensor, "T B"] | None,
    scale: float,
) -> Float[Tensor, "T HqD"]:
    """See `verify_attention`."""
    T, Hq, _ = q.shape
    Hkv, S, _ = k.shape
    unseen = torch.zeros(T, S, dtype=torch.bool, device=q.device)
    if blocked is not None:
        unseen[:, S - blocked.shape[1] :] = blocked
    heads = []
    for h in range(Hq):
        kh, vh = k[h // (Hq // Hkv)].double(), v[h // (Hq // Hkv)].double()
        scores = (q[:, h].double() @ kh.T * scale).masked_fill(unseen, -torch.inf)
        heads.append(torch.softmax(scores, -1).masked_fill(unseen.all(1, keepdim=True), 0) @ vh)
    return torch.stack(heads, 1).reshape(T, -1).to(q.dtype)
