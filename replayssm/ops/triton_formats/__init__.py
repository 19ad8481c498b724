"""What kernels know of a format: one module each, named as it is, imported at the first launch.

- ``held(planes, strides, row, head, first_p, x, P, N, ROWS, KEYS)``: the products (ROWS, t) of the rows of a head's
  state from first_p on with x (t, KEYS). planes are those of ``cache.formats`` or ``cache.checkpoint``, strides lead
  from one row of the cache to the next.
- ``quantize(tile, planes, p, P, N)``, of read formats: writes the copy of a head, in the codes and scales of plain
  PyTorch. tile is what its checkpoint holds, fp32 (ABREAST, deep, outer, LANES) as in ``triton_fold``, all rows of the
  head, zeros behind P and N; p (ABREAST, deep) are the indices of the rows; planes are pointers at those of the row and
  head.
"""
