"""The fit finds known coefficients, keeps them non-negative and shrugs off outliers."""

import numpy as np
import pytest

from megatron_dcp.cost.fit import fit, leave_one_out, nonnegative_least_squares
from megatron_dcp.errors import ConfigError


def points(n=24, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(64, 8192, n).astype(float)
    return np.stack([tokens, tokens**2 / 2, np.ones(n)], axis=1)


def test_exact_times_give_the_coefficients_back():
    a = points()
    truth = np.array([3.1, 2.4e-3, 900.0])
    got = fit(a, a @ truth)
    np.testing.assert_allclose(got.coefficients, truth, rtol=1e-9)
    assert got.median_error < 1e-12


def test_a_coefficient_that_would_be_negative_is_zero_and_the_rest_is_optimal():
    a = points()
    b = a @ np.array([3.0, 2e-3, -400.0])
    x = nonnegative_least_squares(a, b)
    assert x[2] == 0.0
    assert (x >= 0).all()
    # Karush-Kuhn-Tucker: no gradient along the active terms, none inviting the inactive one.
    gradient = a.T @ (a @ x - b)
    assert abs(gradient[0]) < 1e-6 * abs(a[:, 0] @ b)
    assert gradient[2] > 0


def test_outliers_move_the_fit_little():
    a = points(n=30)
    truth = np.array([3.1, 2.4e-3, 900.0])
    b = a @ truth * (1 + 0.01 * np.random.default_rng(1).standard_normal(30))
    b[[3, 17]] *= 4
    np.testing.assert_allclose(fit(a, b).coefficients[:2], truth[:2], rtol=0.05)


def test_leave_one_out_sees_the_point_that_the_model_cannot_explain():
    a = points(n=24)
    b = a @ np.array([3.1, 2.4e-3, 900.0])
    b[5] *= 1.5
    errors = leave_one_out(a, b)
    assert int(np.argmax(errors)) == 5
    assert errors[5] == pytest.approx(1 / 3, rel=0.05)


def test_too_few_points_are_refused():
    with pytest.raises(ConfigError, match="2 measured points for 3"):
        fit(np.ones((2, 3)), [1.0, 2.0])
