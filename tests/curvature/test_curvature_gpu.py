"""The same numbers on a GPU; kernels that can be differentiated twice are found there too."""

from __future__ import annotations

import pytest
import torch
from tests.curvature.common import MODELS, build, losses
from torch.utils.data import TensorDataset

import sordino
from sordino.curvature import HessianOperator, Lanczos, estimate_spectrum, prepare
from sordino.models import build as build_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MODELS)
def test_products(name: str) -> None:
    model, public = build(name)
    there = HessianOperator(model, public, dtype=torch.float64)
    v = torch.randn(there.size, dtype=torch.float64)
    expected = there.matvec(v)
    model.cuda()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        here = HessianOperator(model, public, dtype=dtype)
        assert here.device.type == "cuda"
        found = here.matvec(v.to("cuda", dtype)).cpu().double()
        assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_a_convolutional_network_from_preparation_to_spectrum() -> None:
    torch.manual_seed(0)
    model = build_model("small-cnn", (3, 32, 32), 10).cuda()
    data = TensorDataset(torch.randn(256, 3, 32, 32))
    public = sordino.Public(data, losses(model), "random", batch_size=128)
    ready = prepare(model, public, epochs=2, show=False)
    contrasted = prepare(model, public, "simclr", epochs=1, show=False)
    assert next(contrasted.parameters()).is_cuda
    spectrum = estimate_spectrum(model, public, 20, at=ready, probes=3, steps=30, show=False)
    assert spectrum.computed == 20 and spectrum.details["residual"] <= 1e-3
    operator = HessianOperator(model, public, at=ready)
    operator.products = 0
    top = Lanczos(operator, 3).run(vectors=True)
    assert top.vectors is not None and operator.kept == 1
    u = top.vectors[0].to(operator.device)
    image = operator.matvec(u)
    assert float(torch.linalg.vector_norm(image - top.values[0].to(image) * u)) <= 1.1 * float(top.residuals[0]) + 1e-5
