"""Repairs of Triton's CPU interpreter, for the tests alone; imported before any kernel, with TRITON_INTERPRET=1.

The interpreter truncates where it should round to bfloat16 or to 8 bits, multiplies matrices of bfloat16 as if their
bits were integers, rounds a fused multiply-add twice, cannot loop to a bound of one element with numpy 2.4, and patches
triton.language afresh at every launch and helper call, which takes longer than the kernel. Other arithmetic on bfloat16
itself works on the raw bits too and is not repaired: kernels widen what they load. It also builds types, and checks
32-bit integers for overflow, by hundreds of calls an operation; here both are a look-up or an operation of numpy, which
halves the time of a kernel.
"""

import functools
import operator
import types

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.core import validate_block_shape
from triton.language.semantic import TritonSemantic

TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16)}  # by bytes: how numpy holds what it has no type for
NATIVE = (tl.float16, tl.float32, tl.float64)
OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}

_builder = interpreter.InterpreterBuilder
_cast_impl, _create_fp_to_fp, _create_dot = _builder.cast_impl, _builder.create_fp_to_fp, _builder.create_dot
_create_fma = _builder.create_fma
_patch_lang_tensor, _get_np_dtype = interpreter._patch_lang_tensor, interpreter._get_np_dtype


def converted(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """The numbers of one floating type as another one's, rounded by torch; both as the interpreter holds them."""
    dense = np.ascontiguousarray(data)
    if source in NATIVE:
        numbers = torch.from_numpy(dense.copy())
    else:
        width = dense.itemsize
        numbers = torch.from_numpy(dense.view(np.uint8 if width == 1 else np.int16).copy()).view(TORCH[source])
    numbers = numbers.to(TORCH[target])
    if target not in NATIVE:
        as_torch, as_numpy = BITS[numbers.element_size()]
        return numbers.view(as_torch).numpy().view(as_numpy).reshape(data.shape)
    return numbers.numpy().reshape(data.shape)


def cast_impl(self, source, target_type):
    have, want = source.dtype.scalar, target_type.scalar
    if have in TORCH and want in TORCH:
        return interpreter.TensorHandle(converted(source.data, have, want), want)
    return _cast_impl(self, source, target_type)


def create_fp_to_fp(self, source, target_type, rounding):
    have, want = source.dtype.scalar, target_type.scalar
    nearest = rounding is None or rounding == interpreter._ir.ROUNDING_MODE.RTNE
    if nearest and have in TORCH and want in TORCH:
        return interpreter.TensorHandle(converted(source.data, have, want), want)
    return _create_fp_to_fp(self, source, target_type, rounding)


def create_dot(self, a, b, *rest):
    a, b = (cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *rest)


def create_fma(self, x, y, z):
    """Of fp32, in fp64: the product is exact there, and the sum as good as."""
    if z.dtype.scalar == tl.float32:
        x, y, z = (cast_impl(self, a, tl.float64) for a in (x, y, z))
        return cast_impl(self, _create_fma(self, x, y, z), tl.float32)
    return _create_fma(self, x, y, z)


def check_overflow(self, lhs, rhs, operation):
    """Raise where the numbers of a type of fewer than 64 bits do not hold the result."""
    scalar = lhs.type.scalar
    if scalar.int_bitwidth < 64:
        result = OPERATIONS[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        low, high = scalar.get_int_min_value(), scalar.get_int_max_value()
        assert ((low <= result) & (result <= high)).all(), f"{scalar} overflow in {operation.__name__}"


@functools.cache
def block(shape, element):
    """Of a block: its shape and number of elements, and its name."""
    return tl.tuple(shape), validate_block_shape(shape), f"<{tl.tuple(shape)}, {element}>"


@functools.cache
def sizes(shape):
    """Of a tensor: its shape and number of elements as the interpreter wants them."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(int(np.prod(shape, dtype=np.int64)))


def init_block(self, element_ty, shape):
    self.element_ty = element_ty
    shape = tuple([getattr(size, "value", size) for size in shape])
    self.shape, self.numel, self.name = block(shape, element_ty.name)


def init_tensor(self, handle, kind):
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = sizes(tuple(kind.shape.values) if kind.is_block() else ())


@functools.cache
def np_dtype(scalar):
    return _get_np_dtype(scalar)


def patch_lang_tensor(tensor, *rest):
    patched = _patch_lang_tensor(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.item())
    return patched


_builder.cast_impl, _builder.create_fp_to_fp, _builder.create_dot = cast_impl, create_fp_to_fp, create_dot
_builder.create_fma = create_fma
interpreter._patch_lang_tensor = patch_lang_tensor
interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
interpreter._get_np_dtype = lambda kind: np.dtype(np.uint64) if kind.scalar.is_ptr() else np_dtype(kind.scalar)
TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
