"""The chunked head gives the losses of the whole model, in every family; NaN where there is no target."""

import numpy as np
import pytest
import torch
from helpers_models import FAMILIES, VOCAB_SIZE, tiny_model
from nearline.collect.anatomy import anatomy
from nearline.collect.forward import final_hidden, inputs_of
from nearline.collect.nll import rows_per_chunk, token_nll

# The same float32 operations on other row counts: a few roundings of numbers near ln(160) = 5.
TOLERANCE = 1e-5


def rows_and_targets(n_rows: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    random = np.random.default_rng(seed)
    ids = random.integers(3, VOCAB_SIZE, (1, n_rows))
    targets = np.append(ids[0, 1:], -1)
    targets[[2, 5]] = -1
    return ids, torch.from_numpy(targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_equal_those_of_the_full_logits(family: str) -> None:
    model, _ = tiny_model(family)
    found = anatomy(model)
    ids, target = rows_and_targets(24)
    with torch.inference_mode():
        hidden = final_hidden(found, inputs_of(ids, np.ones_like(ids, bool), torch.device("cpu")))[0]
        nll = token_nll(found, hidden, target, limit_bytes=5 * 4 * VOCAB_SIZE)
        logits = model(input_ids=torch.from_numpy(ids)).logits[0].double()
    wanted = torch.logsumexp(logits, -1) - logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    has_target = target != -1
    torch.testing.assert_close(nll[has_target].double(), wanted[has_target], rtol=TOLERANCE, atol=TOLERANCE)
    assert nll.dtype == torch.float32
    assert (torch.isnan(nll) == ~has_target).all()


def test_the_size_of_a_chunk_changes_nothing() -> None:
    model, _ = tiny_model("gemma2")
    found = anatomy(model)
    ids, target = rows_and_targets(30)
    with torch.inference_mode():
        hidden = final_hidden(found, inputs_of(ids, np.ones_like(ids, bool), torch.device("cpu")))[0]
        losses = [
            token_nll(found, hidden, target, limit_bytes=rows * 4 * VOCAB_SIZE) for rows in (1, 7, 1000)
        ]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def test_no_row_with_a_target_is_fine() -> None:
    model, _ = tiny_model("llama")
    with torch.inference_mode():
        nll = token_nll(anatomy(model), torch.zeros(4, 32), torch.full((4,), -1))
    assert torch.isnan(nll).all()


def test_logits_of_a_large_vocabulary_never_exceed_the_limit() -> None:
    assert rows_per_chunk(262_144, 64 * 2**20) * 262_144 * 4 <= 64 * 2**20
    assert rows_per_chunk(10**9, 1) == 1
    model, _ = tiny_model("llama")
    found = anatomy(model)
    sizes: list[int] = []
    hook = found.head.register_forward_hook(lambda module, args, output: sizes.append(output.numel() * 4))
    with torch.inference_mode():
        token_nll(
            found, torch.zeros(100, 32), torch.zeros(100, dtype=torch.long), limit_bytes=10 * 4 * VOCAB_SIZE
        )
    hook.remove()
    assert max(sizes) <= 10 * 4 * VOCAB_SIZE
    assert sum(sizes) == 100 * 4 * VOCAB_SIZE
