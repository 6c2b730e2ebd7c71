"""The inverse DCT of a block of 8 x 8 coefficients, as vector instructions: what libjpeg calls "islow", bit for bit.

One vector holds a row of the block. Loops over the same sums leave the turning of rows into columns to the compiler,
which makes it element by element: that took three times as long. (Loeffler, Ligtenberg, Moschytz: "Practical fast 1-D
DCT algorithms with 11 multiplications", ICASSP 1989; libjpeg-turbo's jidctint.c.)
"""
# mypy: disallow_untyped_defs=False

from __future__ import annotations

from profiler.jit import Later, intrinsic, later

ir, types = later("llvmlite.ir"), later("numba.types")

CONST_BITS, PASS1_BITS = 13, 2
LARGEST_SUM = 5900
"""Sum of the absolute values of a block's coefficients, up to which no 16-bit step of libjpeg-turbo's own vector code
overflows: (32767 / 2**PASS1_BITS) / (sqrt(2) cos(pi / 16))."""

_I8, _I32 = Later(lambda: ir.IntType(8)), Later(lambda: ir.IntType(32))
_ROW = Later(lambda: ir.VectorType(_I32, 8))


@intrinsic
def inverse(typingctx, coefficients, pixels, stride):
    """Write the 8 x 8 pixels of a block: uint8, rows ``stride`` bytes apart, from int32[64] (both are addresses)."""

    def codegen(context, builder, signature, args):
        source = builder.inttoptr(args[0], _ROW.as_pointer())
        rows = [_load(builder, builder.gep(source, [_I32(row)])) for row in range(8)]
        total = _sum_of_sizes(builder, rows)
        rows = _turned(builder, _pass(builder, rows, CONST_BITS - PASS1_BITS))
        rows = _turned(builder, _pass(builder, rows, CONST_BITS + PASS1_BITS + 3))
        for row, values in enumerate(rows):
            address = builder.add(args[1], builder.mul(args[2], args[2].type(row)))
            centred = builder.add(values, _same(128))
            above = builder.select(builder.icmp_signed(">", centred, _same(255)), _same(255), centred)
            clipped = builder.select(builder.icmp_signed("<", above, _same(0)), _same(0), above)
            bytes_ = builder.trunc(clipped, ir.VectorType(_I8, 8))
            builder.store(bytes_, builder.inttoptr(address, bytes_.type.as_pointer()), align=1)
        return total

    return types.int32(types.uint64, types.uint64, types.uint64), codegen


def _load(builder, pointer):
    return builder.load(pointer, align=4)


def _sum_of_sizes(builder, rows):
    total = _same(0)
    for row in rows:
        negative = builder.icmp_signed("<", row, _same(0))
        size = builder.select(negative, builder.sub(_same(0), row), row)
        size = builder.select(builder.icmp_unsigned("<", size, _same(32767)), size, _same(32767))
        total = builder.add(total, size)
    lanes = [builder.extract_element(total, _I32(lane)) for lane in range(8)]
    result = lanes[0]
    for lane in lanes[1:]:
        result = builder.add(result, lane)
    return result


def _same(number):
    return ir.Constant(_ROW, [number] * 8)


def _pass(builder, rows, shift):
    """The one-dimensional transform of each lane; rows are coefficients before, samples scaled by sqrt(8) after."""

    def times(value, constant):
        return builder.mul(value, _same(constant))

    def scaled(value):
        return builder.shl(value, _same(CONST_BITS))

    def descaled(value):
        return builder.ashr(builder.add(value, _same(1 << (shift - 1))), _same(shift))

    add, sub = builder.add, builder.sub
    z1 = times(add(rows[2], rows[6]), 4433)
    even = (add(z1, times(rows[6], -15137)), add(z1, times(rows[2], 6270)))
    total, difference = scaled(add(rows[0], rows[4])), scaled(sub(rows[0], rows[4]))
    upper = (add(total, even[1]), add(difference, even[0]), sub(difference, even[0]), sub(total, even[1]))

    t0, t1, t2, t3 = rows[7], rows[5], rows[3], rows[1]
    z3, z4 = add(t0, t2), add(t1, t3)
    z5 = times(add(z3, z4), 9633)
    z1, z2 = times(add(t0, t3), -7373), times(add(t1, t2), -20995)
    z3, z4 = add(times(z3, -16069), z5), add(times(z4, -3196), z5)
    lower = (
        add(times(t3, 12299), add(z1, z4)),
        add(times(t2, 25172), add(z2, z3)),
        add(times(t1, 16819), add(z2, z4)),
        add(times(t0, 2446), add(z1, z3)),
    )
    first = [descaled(add(one, other)) for one, other in zip(upper, lower, strict=True)]
    last = [descaled(sub(one, other)) for one, other in zip(upper, lower, strict=True)]
    return first + last[::-1]


def _turned(builder, rows):
    """Rows become columns: three rounds of shuffles of two vectors each."""

    def mix(one, other, lanes):
        return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_I32, 8), lanes))

    for half in (4, 2, 1):
        low = [lane if not lane & half else lane - half + 8 for lane in range(8)]
        high = [lane + half if not lane & half else lane + 8 for lane in range(8)]
        made = list(rows)
        for row in range(8):
            if not row & half:
                made[row] = mix(rows[row], rows[row + half], low)
                made[row + half] = mix(rows[row], rows[row + half], high)
        rows = made
    return rows
