"""Position-sensitive pooling and vote (Dai et al., "R-FCN", section 3), with the rounding of the authors' code."""

from __future__ import annotations

import torch

from summit_train.tasks.detection.rfcn import STRIDE


def vote(maps_FCHW: torch.Tensor, boxes_FR4: torch.Tensor, grid: int) -> torch.Tensor:
    """Pool maps (F, grid * grid * K, h, w) by position within R boxes of each of F frames: (F, R, K).

    A box is cut into grid x grid cells. Cell (i, j) of box r has the mean of the maps (i, j) over the places in it, and
    the vote is the mean over the cells:

        vote_rk = 1 / grid^2 sum_ij sum_yx row_riy column_rjx map_ijkyx

    row_riy is 1 over the number of rows in cell row i for each of them and 0 elsewhere, column_rjx likewise. Sums over
    x are a matrix product for each cell, those over y a second one's worth of multiplications: both have gradients
    that no order of threads changes, which the sums of an integral image would not have on a GPU.
    """
    frames, channels, height, width = maps_FCHW.shape
    cells = maps_FCHW.reshape(frames, grid * grid, channels // grid**2, height, width).unbind(1)
    column = [one.contiguous() for one in _shares(boxes_FR4[..., 0::2], grid, width, maps_FCHW.dtype).unbind(2)]
    row = _shares(boxes_FR4[..., 1::2], grid, height, maps_FCHW.dtype).unbind(2)
    total = maps_FCHW.new_zeros(())
    for number, cell_FKHW in enumerate(cells):
        i, j = divmod(number, grid)
        along_x = column[j] @ cell_FKHW.permute(0, 3, 1, 2).reshape(frames, width, -1)  # (F, R, K * h)
        total = total + (along_x.view(*along_x.shape[:2], -1, height) * row[i][:, :, None, :]).sum(-1)
    return total / grid**2


def _shares(edges_FR2: torch.Tensor, grid: int, extent: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (F, R, grid, extent): the share of each of `extent` places in the mean over each cell of a box.

    edges: the box's begin and end along this axis, in pixels. R-FCN's psroi_pooling_op.cu: edges are rounded to pixels
    (it adds 1 to an end that is the last pixel, which an edge behind it contains), a box is at least 0.1 places long,
    and a cell has the places from the floor of its begin to the ceiling of its end. It computes with floats; these are
    integers, in units of 1 / (5 * grid) pixels, and no rounding decides about a place.
    """
    begin, end = (edges_FR2.detach() + 0.5).floor().long().unbind(-1)
    unit = 5 * grid
    length = (5 * (end - begin)).clamp(min=5 * STRIDE // 10)  # in fifths of a pixel: of a cell, in units
    ends = begin[..., None] * unit + torch.arange(grid + 1, device=begin.device) * length[..., None]
    first = ends[..., :-1] // (STRIDE * unit)
    behind = -(-ends[..., 1:] // (STRIDE * unit))
    place = torch.arange(extent, device=begin.device)
    is_inside = (place >= first[..., None]) & (place < behind[..., None])
    return is_inside.to(dtype) / is_inside.sum(-1, keepdim=True).clamp(min=1)
