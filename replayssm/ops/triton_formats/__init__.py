"""What kernels know of a format: one module each, named as it is, imported at the first launch.

- ``held(planes, strides, row, head, first_p, x, P, N, ROWS, KEYS)``: the products (ROWS, t) of the rows of a head's
  state from first_p on with x (t, KEYS).

planes are those of ``cache.formats`` or ``cache.checkpoint``, strides lead from one row of the cache to the next.
"""
