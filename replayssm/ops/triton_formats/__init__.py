"""Read formats in kernels: one module a format, named as that of ``cache.formats`` whose planes it writes and reads.

``quantize(tile, planes, p, P, N)`` writes the copy of a head. tile is what its checkpoint holds, fp32 (ABREAST, deep,
outer, LANES) as in ``triton_fold``, all rows of the head, zeros behind P and N; planes are pointers at those of the row
and head; p (ABREAST, deep) are the indices of the rows. Codes and scales are those of the format in plain PyTorch.
"""
