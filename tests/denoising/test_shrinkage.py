"""Shrinkage against the theory it rests on."""

from __future__ import annotations

import math

import pytest
import torch

from sordino.denoising import DENOISERS, NoDenoising, Shrinkage, build, check, denoise
from sordino.denoising.shrinkage import shrink, shrunk
from sordino.errors import SordinoError, Unsupported


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def paper_eta(y: torch.Tensor, m: int, n: int, s: float) -> torch.Tensor:
    """Eq. 8 of the gradient-matrix denoising paper, through λ = F⁻¹(y)."""
    inside = (y**2 - (m + n) * s**2) ** 2 - 4 * m * n * s**4
    lam2 = 0.5 * (y**2 - (m + n) * s**2 + inside.sqrt())
    u = (lam2**2 - m * n * s**4) / (lam2**2 + m * lam2 * s**2)
    v = (lam2**2 - m * n * s**4) / (lam2**2 + n * lam2 * s**2)
    return lam2.sqrt() * u.sqrt() * v.sqrt()


@pytest.mark.parametrize("m, n", [(1, 1), (4, 64), (64, 4), (8, 8), (16, 768), (300, 200)])
@pytest.mark.parametrize("s", [1e-3, 1.0, 7.0])
def test_eta_is_the_papers_and_gavish_donohos(m: int, n: int, s: float) -> None:
    edge = s * (math.sqrt(m) + math.sqrt(n))
    y = edge * torch.linspace(1.001, 30, 500, dtype=torch.float64)
    gavish_donoho = ((y**2 - (m + n) * s**2) ** 2 - 4 * m * n * s**4).sqrt() / y
    ours = shrunk(y, m, n, s)
    torch.testing.assert_close(ours, gavish_donoho, rtol=1e-9, atol=0)
    torch.testing.assert_close(ours, paper_eta(y, m, n, s), rtol=1e-7, atol=0)
    below = edge * torch.linspace(0, 1, 50, dtype=torch.float64)
    assert (shrunk(below, m, n, s) <= 1e-12 * edge).all()


def test_lambda_is_the_inverse_of_f() -> None:
    """F(λ) = √((λ+s²n/λ)(λ+s²m/λ)); η applied to F(λ) is λ times the two expected cosines."""
    m, n, s = 30, 50, 0.7
    lam = torch.linspace(1.01, 20, 100, dtype=torch.float64) * s * (m * n) ** 0.25
    y = ((lam + s**2 * n / lam) * (lam + s**2 * m / lam)).sqrt()
    cos_u2 = (lam**4 - m * n * s**4) / (lam**4 + m * lam**2 * s**2)
    cos_v2 = (lam**4 - m * n * s**4) / (lam**4 + n * lam**2 * s**2)
    torch.testing.assert_close(shrunk(y, m, n, s), lam * (cos_u2 * cos_v2).sqrt(), rtol=1e-9, atol=0)


def planted(
    m: int = 60, n: int = 120, strengths: tuple[float, ...] = (30.0, 22.0), s: float = 1.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(seed)
    U = torch.linalg.qr(torch.randn(m, len(strengths), generator=g))[0]
    V = torch.linalg.qr(torch.randn(n, len(strengths), generator=g))[0]
    S = (U * torch.tensor(strengths)) @ V.T
    return S, S + s * torch.randn(m, n, generator=g)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def test_the_norm_is_kept() -> None:
    _, Y = planted()
    out = denoise("shrinkage", Y, 1.0)
    assert not torch.equal(out, Y)
    torch.testing.assert_close(out.norm(), Y.norm(), rtol=1e-5, atol=0)
    unscaled = denoise(Shrinkage(rescale=False), Y, 1.0)
    assert unscaled.norm() < 0.9 * Y.norm()
    torch.testing.assert_close(unscaled / unscaled.norm(), out / out.norm(), rtol=1e-4, atol=1e-6)


def test_a_planted_signal_is_recovered() -> None:
    for seed in range(5):
        S, Y = planted(seed=seed)
        assert cosine(denoise("shrinkage", Y, 1.0), S) > cosine(Y, S) + 0.3


def test_unscaled_error_is_what_theory_says() -> None:
    """Squared error of the optimal shrinker: Σ λ²(1 − cos²u·cos²v), asymptotically."""
    m, n, lams = 300, 600, (60.0, 45.0)
    S, Y = planted(m, n, lams, seed=3)
    got = float((denoise(Shrinkage(rescale=False), Y, 1.0) - S).square().sum())
    want = 0.0
    for lam in lams:
        cu = (lam**4 - m * n) / (lam**4 + m * lam**2)
        cv = (lam**4 - m * n) / (lam**4 + n * lam**2)
        want += lam**2 * (1 - cu * cv)
    assert got == pytest.approx(want, rel=0.1)


def test_a_wrong_s_costs() -> None:
    """Too small an s keeps noise, too large an s drops signal: .83 at s, .66 at .8 s, .73 at 1.25 s in kind."""
    at = {}
    for factor in (0.8, 1.0, 1.25):
        cosines = []
        for seed in range(8):
            S, Y = planted(100, 200, (32.0, 28.0, 24.0), seed=seed)
            cosines.append(cosine(denoise("shrinkage", Y, factor), S))
        at[factor] = sum(cosines) / len(cosines)
    assert at[1.0] > at[0.8] + 0.05
    assert at[1.0] > at[1.25] + 0.05


@pytest.mark.parametrize(
    "m, n, draws, predicted", [(4, 64, 40_000, 0.056), (8, 8, 40_000, 0.072), (16, 768, 4_000, 0.007)]
)
def test_pure_noise_passes_as_rarely_as_predicted(m: int, n: int, draws: int, predicted: float) -> None:
    Y = torch.randn(draws, m, n, generator=generator(1))
    changed = (shrink(Y, 1.0) != Y).flatten(1).any(1).double().mean().item()
    # The predictions are rounded to .1 %; four binomial standard errors beside that.
    slack = 0.0005 + 4 * math.sqrt(predicted * (1 - predicted) / draws)
    assert changed == pytest.approx(predicted, abs=slack)


def test_under_the_threshold_the_layer_is_left_as_it_is() -> None:
    m, n = 40, 60
    edge = math.sqrt(m) + math.sqrt(n)
    Y = torch.randn(m, n, generator=generator(0), dtype=torch.float64)
    Y *= 1.01 * edge / torch.linalg.matrix_norm(Y, 2)
    assert torch.equal(denoise("shrinkage", Y, 1.0), Y)  # κ = 1.02 is not reached
    assert not torch.equal(denoise(Shrinkage(kappa=1.0), Y, 1.0), Y)


def test_layers_of_one_shape_share_a_decomposition_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    svd = torch.linalg.svd

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return svd(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "svd", counted)
    made = {f"layer{i}": planted(seed=i)[1] for i in range(3)}
    made["tall"] = planted(120, 60, seed=9)[1]
    updates = {k: v.clone() for k, v in made.items()} | {"bias": torch.ones(5), "other": made["tall"].clone()}
    Shrinkage()(updates, 1.0, set(made))
    assert len(calls) == 2
    assert torch.equal(updates["bias"], torch.ones(5)) and torch.equal(updates["other"], made["tall"])
    for name, Y in made.items():
        torch.testing.assert_close(updates[name], denoise("shrinkage", Y, 1.0))
        assert not torch.equal(updates[name], Y)


def test_half_precision_is_computed_in_float32() -> None:
    S, Y = planted()
    out = denoise("shrinkage", Y.bfloat16(), 1.0)
    assert out.dtype == torch.bfloat16
    assert cosine(out.float(), S) > cosine(Y, S) + 0.3


def test_no_noise_means_no_change() -> None:
    Y = planted()[1]
    assert torch.equal(denoise("shrinkage", Y, 0.0), Y)
    assert torch.equal(denoise("none", Y, 1.0), Y)
    zero = torch.zeros(4, 5)
    assert torch.equal(denoise("shrinkage", zero, 1.0), zero)


def test_what_goes_with_what_is_data() -> None:
    shrinkage = DENOISERS.find("shrinkage")
    assert check(shrinkage, correlated_noise=False, white_noise=True) == []
    (warning,) = check(shrinkage, correlated_noise=True, white_noise=True)
    assert "usually harmful" in warning
    with pytest.raises(Unsupported, match="'gep'.*denoising='none'"):
        check(shrinkage, correlated_noise=False, white_noise=False, geometry="gep")
    assert check(DENOISERS.find("none"), correlated_noise=True, white_noise=False, geometry="gep") == []


def test_choices_and_mistakes() -> None:
    assert isinstance(build(None), NoDenoising) and isinstance(build("none"), NoDenoising)
    assert build({"name": "shrinkage", "kappa": 1.1}) == Shrinkage(kappa=1.1)
    mine = Shrinkage(kappa=2)
    assert build(mine) is mine
    for bad in (0.9, math.nan, math.inf, "1", True):
        with pytest.raises(SordinoError, match="kappa="):
            Shrinkage(kappa=bad)  # type: ignore[arg-type]
    with pytest.raises(SordinoError, match="did you mean 'shrinkage'"):
        build("shrinkge")
    with pytest.raises(SordinoError, match="has no option 'kapa'; known: kappa, rescale"):
        build({"name": "shrinkage", "kapa": 1.1})
    with pytest.raises(SordinoError, match="needs a name"):
        build({"kappa": 1.1})
    with pytest.raises(SordinoError, match="finite standard deviation"):
        denoise("shrinkage", torch.zeros(2, 2), math.nan)
    with pytest.raises(SordinoError, match="works on matrices"):
        denoise("shrinkage", torch.zeros(2, 2, 2), 1.0)
