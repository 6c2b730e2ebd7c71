// Float32 to float16 and back, and what that loses. As in gpu/half.py: integer and float32 arithmetic, the same bits as
// on the host, round to nearest, ties to even.
//
// Thread t takes the values t, t + count, ... and writes what it counted to lost[4][count]; these are added up afterwards.

INLINE u16 to_half(u32 bits) {
    const u32 size = bits & 0x7FFFFFFFu;
    u32 half;
    if (size < 0x38800000u) {
        // Below 2^-14. Adding 1/2 leaves steps of 2^-24, those of the subnormals; the addition rounds as it should.
        const float lifted = __uint_as_float(size) + 0.5f;
        half = (u32)((lifted - 0.5f) * 16777216.0f);
    } else {
        half = (size - (0x38000000u - 0xFFFu) + (size >> 13 & 1u)) >> 13;
    }
    if (size >= 0x477FF000u) half = 0x7C00u;
    if (size > 0x7F800000u) half = 0x7E00u;
    return (u16)(half | (bits >> 16 & 0x8000u));
}

INLINE float from_half(u16 half) {
    const u32 exponent = half >> 10 & 31u, digits = half & 0x3FFu, sign = (u32)(half & 0x8000u) << 16;
    if (exponent == 31u) return __uint_as_float(sign | 0x7F800000u | digits << 13);
    const float step = __uint_as_float(((exponent ? exponent : 1u) + 102u) << 23);  // 2^(exponent - 25)
    const float value = (float)(exponent ? digits | 0x400u : digits) * step;
    return sign ? -value : value;
}

// Finite values that became infinite, values other than 0 that became 0 or subnormal, finite values other than 0.
INLINE void tally(u32 before, u16 after, i64 *seen) {
    const u32 old = before & 0x7FFFFFFFu, now = after & 0x7FFFu;
    if (old == 0u || old >= 0x7F800000u) return;
    ++seen[3];
    if (now >= 0x7C00u) ++seen[0];
    else if (now == 0u) ++seen[1];
    else if (now < 0x400u) ++seen[2];
}

#define WRITE_LOST for (int k = 0; k < 4; ++k) lost[k * (i64)count + t] = seen[k]

KERNEL half_encode(const u32 *x, u16 *y, i64 *lost, int count, i64 values) {
    for (EACH(t, count)) {
        i64 seen[4] = {0, 0, 0, 0};
        for (i64 i = t; i < values; i += count) tally(x[i], y[i] = to_half(x[i]), seen);
        WRITE_LOST;
    }
}

KERNEL half_round(const u32 *x, float *y, i64 *lost, int count, i64 values) {
    for (EACH(t, count)) {
        i64 seen[4] = {0, 0, 0, 0};
        for (i64 i = t; i < values; i += count) {
            const u16 half = to_half(x[i]);
            y[i] = from_half(half);
            tally(x[i], half, seen);
        }
        WRITE_LOST;
    }
}
