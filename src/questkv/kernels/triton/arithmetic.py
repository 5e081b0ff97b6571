"""What the kernels compute with: exact changes of type, dot products in float32, and tanh."""

from __future__ import annotations

from questkv.kernels.triton.language import INTERPRETED, constant, jit, tl

# Weights of a softmax lie in [0, 1]. In float16 they are taken times this, so that small ones keep their bits.
FLOAT16_WEIGHT = constant(32768.0)
# x + this - this is x rounded to a whole number, ties to even, for a float64 x in [0, 2**51].
_ROUNDING = constant(6755399441055744.0)


@jit
def widen(x):
    """Float32 of a float type, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def narrow(x, dtype: tl.constexpr):
    """Float32 rounded to a float type, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # Adding would make an infinity, or a number, of some NaNs.
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@jit
def whole(x):
    """A float64 in [0, 2**51] rounded to a whole number, ties to even."""
    return (x + _ROUNDING) - _ROUNDING


@jit
def product(b_a, b_b):
    """[M, K] times [K, N], summed in float32."""
    if INTERPRETED:
        b_a = widen(b_a)
        b_b = widen(b_b)
    return tl.dot(b_a, b_b, input_precision="ieee")


@jit
def add_product(b_a, b_b, b_sum):
    """[M, N] float32 plus [M, K] times [K, N]."""
    if INTERPRETED:
        b_a = widen(b_a)
        b_b = widen(b_b)
    return tl.dot(b_a, b_b, b_sum, input_precision="ieee")


@jit
def add_weighted(b_w, b_v, b_sum):
    """[M, N] float32 plus float32 weights [M, K] times b_v [K, N], to float32's precision whatever b_v's type.

    Tensor cores take both factors in one type. Weights in a narrow type are a sum of parts: three of bfloat16's 8 bits,
    or two of float16's 11, hold float32's 24 (22). Weights for float16 must be below its largest number.
    """
    if b_v.dtype == tl.float32:
        return add_product(b_w, b_v, b_sum)
    b_first = narrow(b_w, b_v.dtype)
    b_rest = b_w - widen(b_first)
    b_second = narrow(b_rest, b_v.dtype)
    b_sum = add_product(b_first, b_v, b_sum)
    b_sum = add_product(b_second, b_v, b_sum)
    if b_v.dtype == tl.bfloat16:
        b_sum = add_product(narrow(b_rest - widen(b_second), b_v.dtype), b_v, b_sum)
    return b_sum


@jit
def product_with_float32(b_a, b_b):
    """[M, K] of a model's type times float32 [K, N], which goes in as two parts of that type (16 or 22 bits)."""
    if b_a.dtype == tl.float32:
        return product(b_a, b_b)
    b_first = narrow(b_b, b_a.dtype)
    return add_product(b_a, narrow(b_b - widen(b_first), b_a.dtype), product(b_a, b_first))


@jit
def tanh(x):
    """Hyperbolic tangent, within a few units of float32's last place, where x is small too.

    Below 0.55 an odd polynomial, fitted to tanh(x) / x in x squared (relative error 7e-8 at most); above, by exp.
    """
    size = tl.abs(x)
    t = tl.exp(-2.0 * size)
    far = tl.math.div_rn(1.0 - t, 1.0 + t)
    z = size * size
    b_fit = -0.006548397243022919 * z + 0.021276434883475304
    b_fit = (b_fit * z - 0.05390407517552376) * z + 0.13333086669445038
    near = size + size * z * (b_fit * z - 0.3333333134651184)
    value = tl.where(size < 0.55, near, far)
    return tl.where(x < 0, -value, value)
