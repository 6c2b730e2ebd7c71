// Dropout's mask: the words of Philox4x64-10 (Salmon et al., SC 2011), as numpy.random.Philox gives them.

#ifdef __CUDACC__
#define high(a, b) __umul64hi(a, b)
#else
INLINE u64 high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
#endif

// mask[i] is 0 where the i-th 32-bit word (low half of a word first) is below limit, else kept; eight values a block.
// Counter words 1 to 3 are given, word 0 counts blocks from 1.
KERNEL dropout_mask(float *mask, int count, int values, u64 limit, float kept, u64 key0, u64 key1,
                    u64 c1, u64 c2, u64 c3) {
    for (EACH(block, count)) {
        u64 w[4] = {(u64)block + 1, c1, c2, c3};
        u64 k0 = key0, k1 = key1;
        for (int round = 0; round < 10; ++round) {
            const u64 m0 = 0xD2E7470EE14C6C93ULL, m1 = 0xCA5A826395121157ULL;
            const u64 high0 = high(m0, w[0]), low0 = m0 * w[0], high1 = high(m1, w[2]), low1 = m1 * w[2];
            w[0] = high1 ^ w[1] ^ k0;
            w[1] = low1;
            w[2] = high0 ^ w[3] ^ k1;
            w[3] = low0;
            k0 += 0x9E3779B97F4A7C15ULL;
            k1 += 0xBB67AE8584CAA73BULL;
        }
        for (int j = 0; j < 8 && 8 * block + j < values; ++j) {
            const u64 half = j & 1 ? w[j / 2] >> 32 : w[j / 2] & 0xFFFFFFFFu;
            mask[8 * block + j] = half < limit ? 0.0f : kept;
        }
    }
}
