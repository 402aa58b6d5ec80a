"""Tables looked up with indices that do not come from the batch, but are there for every example."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sordino.gradients.uses import Rows

D = torch.float64


class Places(nn.Module):
    """Words, with the ids of places and kinds written out for every example, as BERT's callers may."""

    def __init__(self, order: str, padding_idx: int | None) -> None:
        super().__init__()
        self.order = order
        self.words, self.out = nn.Embedding(11, 6), nn.Linear(6, 2)
        self.places, self.kinds = nn.Embedding(5, 6), nn.Embedding(2, 6, padding_idx=padding_idx)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(words.shape[1]).expand(words.shape).contiguous()
        if self.order == "places first":
            h = self.words(words)
            places, kinds = self.places(ids), self.kinds(torch.zeros_like(words))
            h, places, kinds = (t.transpose(0, 1) for t in (h, places, kinds))
            h = (h + places - kinds).transpose(0, 1)
        else:
            h = self.words(words) * self.places(ids) + self.kinds(1 - ids.clamp(max=1))
        return F.cross_entropy(self.out(h.tanh().mean(1)), words[:, 0] % 2, reduction="none")


@pytest.mark.parametrize("n", [1, 4, 5])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("order", ["examples first", "places first"])
def test_ids_written_out_for_every_example(compare, order, padding_idx, n):
    model = Places(order, padding_idx).double()
    compare(model, lambda words: model(words), (torch.randint(0, 11, (n, 5)),), n)


def test_they_are_one_hot_factors(monkeypatch):
    """Not a table's gradient an example: that would be a loop over the examples."""
    from sordino.gradients.rules import broadcast

    seen: list[torch.Size] = []

    class Seen(Rows):
        def __post_init__(self) -> None:
            super().__post_init__()
            seen.append(self.index.shape)

    monkeypatch.setattr(broadcast, "Rows", Seen)
    from sordino import Budget, make_private

    model = Places("examples first", None)
    data = torch.utils.data.TensorDataset(torch.randint(0, 11, (8, 5)))
    private = make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), data, budget=Budget(8, 1e-2), batch_size=4, epochs=1, seed=0
    )
    for batch in private.batches():
        private.backward(lambda x: model(x), batch)
    assert any(shape[0] > 1 for shape in seen)
