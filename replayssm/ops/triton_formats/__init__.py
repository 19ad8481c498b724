"""What kernels know of a format: one module each, named as it is, imported at the first launch.

- ``held(planes, strides, row, head, first_p, x_q, x_k, P, N, ROWS, KEYS, DELTA)``: the products (ROWS, t) of the rows
  of a head's state from first_p on with x_q and with x_k (t, KEYS); the second counts with a delta rule only.

planes are those of ``cache.formats`` or ``cache.checkpoint``, strides lead from one row of the cache to the next.
"""
