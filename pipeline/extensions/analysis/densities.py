"""Outlines of kernel densities: where most points of a language lie on a map (MMNMT, Figure 4).

The density of points is the mean of bivariate normal densities around them, with the covariance of
the points and Scott's bandwidth, as in SciPy's ``gaussian_kde``. An outline bounds the region of
highest density that holds a share of it. It consists of the segments in which the outline crosses
the triangles of a grid, in no order.

Legend: N points, X and Y places of a grid.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

SHARES = (0.5, 0.9)
"""Shares of the density that outlines hold."""
PLACES = 32
"""Places of the grid in each dimension."""
MARGIN = 3.0
"""Margin of the grid around the points, in standard deviations of a kernel."""

Floats = npt.NDArray[np.float64]
Segment = tuple[tuple[float, float], tuple[float, float]]


def outlines(points: Sequence[Sequence[float]]) -> list[list[Segment]]:
    """Return an outline per share; none of points that are too few or lie on a line.

    Args:
        points: x and y of every point.
    """
    xy_N2 = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    kernel_22 = kernel_covariance(xy_N2)
    if kernel_22 is None:
        return []
    margin_2 = MARGIN * np.sqrt(kernel_22.diagonal())
    x_X, y_Y = np.linspace(xy_N2.min(axis=0) - margin_2, xy_N2.max(axis=0) + margin_2, PLACES).T
    density_XY = density(xy_N2, kernel_22, x_X, y_Y)
    return [list(crossings(x_X, y_Y, density_XY - level_of(density_XY, share))) for share in SHARES]


def kernel_covariance(xy_N2: Floats) -> Floats | None:
    """Return the covariance of a kernel, by Scott's rule; None if it has no inverse."""
    if len(xy_N2) < 3:
        return None
    covariance_22 = np.cov(xy_N2.T) * len(xy_N2) ** (-1 / 3)
    spread = float(np.trace(covariance_22))
    is_flat = not np.linalg.det(covariance_22) > 1e-9 * spread**2
    return None if is_flat else covariance_22


def density(xy_N2: Floats, kernel_22: Floats, x_X: Floats, y_Y: Floats) -> Floats:
    """Return the density of points at the places of a grid, (X, Y)."""
    grid_XY2 = np.stack(np.meshgrid(x_X, y_Y, indexing="ij"), axis=2)
    away_NXY2 = grid_XY2 - xy_N2[:, None, None]
    inverse_22 = np.linalg.inv(kernel_22)
    square_NXY = np.einsum("nxyi,ij,nxyj->nxy", away_NXY2, inverse_22, away_NXY2)
    mean_XY: Floats = np.exp(-0.5 * square_NXY).mean(axis=0)
    mean_XY /= 2.0 * np.pi * np.sqrt(np.linalg.det(kernel_22))
    return mean_XY


def level_of(density_XY: Floats, share: float) -> float:
    """Return the density at the edge of the densest places that hold a share of it all."""
    falling = np.sort(density_XY, axis=None)[::-1]
    held = np.cumsum(falling) / falling.sum()
    return float(falling[np.searchsorted(held, share)])


def crossings(x_X: Floats, y_Y: Floats, height_XY: Floats) -> Iterator[Segment]:
    """Yield where the sign of heights changes: a segment in each triangle that has both signs.

    Each cell of the grid is two triangles, in which heights are linear.
    """
    for i in range(len(x_X) - 1):
        for j in range(len(y_Y) - 1):
            for third in ((i + 1, j), (i, j + 1)):
                corners = ((i, j), third, (i + 1, j + 1))
                above = [bool(height_XY[corner] > 0) for corner in corners]
                if all(above) or not any(above):
                    continue
                alone = above.index(sum(above) == 1)
                one, other = (
                    _crossing(x_X, y_Y, height_XY, corners[alone], corner)
                    for place, corner in enumerate(corners)
                    if place != alone
                )
                yield one, other


def _crossing(
    x_X: Floats, y_Y: Floats, height_XY: Floats, one: tuple[int, int], other: tuple[int, int]
) -> tuple[float, float]:
    """Return where heights are zero between two places of opposite signs."""
    one, other = sorted((one, other))  # so that neighboring triangles find the same place
    share = height_XY[one] / (height_XY[one] - height_XY[other])
    ends = (np.array([x_X[place[0]], y_Y[place[1]]]) for place in (one, other))
    start, end = ends
    x, y = np.round(start + share * (end - start), 3).tolist()
    return x, y
