// The hashes of profiler/hashing.py and the statistics of float32 values, in one pass over rows[rows, units].
//
// A row is shared by `lanes` threads; each writes what it found to a place of its own, and integers (whose sums do not
// depend on order) are added up afterwards. Hashes read 64-bit words: two units of 32 bits, zeros after the end.
// Where a row has an odd number of units, the words of a row and those of the whole buffer do not coincide.

#define POSITION 0xD6E8FEB86659FD93ULL
#define M1 0xBF58476D1CE4E5B9ULL
#define M2 0x94D049BB133111EBULL
#define LENGTH 0x2545F4914F6CDD1DULL

INLINE u64 mix(u64 x) {
    x = (x ^ x >> 32) * M1;
    x = (x ^ x >> 29) * M2;
    return x ^ x >> 32;
}

INLINE u64 word(const u32 *units, i64 at, i64 end) {
    return (u64)units[at] | (at + 1 < end ? (u64)units[at + 1] << 32 : 0);
}

// What one unit adds to largest[], squares[] and counts[4] (zeros, subnormals, infinities, NaN).
INLINE void look_at(u32 unit, u32 *largest, double *squares, i64 *counts) {
    const u32 magnitude = unit & 0x7FFFFFFFu;  // of finite floats the bits are in the order of the values
    if (magnitude > 0x7F800000u) {
        ++counts[3];
    } else if (magnitude == 0x7F800000u) {
        ++counts[2];
    } else {
        if (magnitude > *largest) *largest = magnitude;
        const double value = (double)__uint_as_float(magnitude);
        *squares += value * value;
        if (magnitude == 0) ++counts[0];
        else if (magnitude < 0x00800000u) ++counts[1];
    }
}

// For count = rows * lanes threads: ordered[t] and multiset[t] (sums of mixed words), largest[t] (float32 bits),
// squares[t], counts[4][t].
KERNEL fingerprint(const u32 *data, u64 *ordered, u64 *multiset, u32 *largest, double *squares, i64 *counts,
                   int count, int lanes, i64 rows, i64 units) {
    const i64 total = rows * units, words = (units + 1) / 2;
    for (EACH(t, count)) {
        const i64 row = t / lanes;
        const u32 *mine = data + row * units;
        u64 all = 0, own = 0;
        u32 most = 0;
        double sum = 0.0;
        i64 seen[4] = {0, 0, 0, 0};
        for (i64 i = t % lanes; i < words; i += lanes) {
            own += mix(word(mine, 2 * i, units) ^ (u64)(i + 1) * POSITION);
            for (i64 at = 2 * i; at < 2 * i + 2 && at < units; ++at) {
                const i64 place = row * units + at;  // a word of the buffer begins at each even place
                if (place % 2 == 0) all += mix(word(data, place, total) ^ (u64)(place / 2 + 1) * POSITION);
                look_at(mine[at], &most, &sum, seen);
            }
        }
        ordered[t] = all;
        multiset[t] = own;
        largest[t] = most;
        squares[t] = sum;
        for (int k = 0; k < 4; ++k) counts[k * (i64)count + t] = seen[k];
    }
}

// hashes[row] = the finished hash of each row of nbytes bytes, from its lanes' sums.
KERNEL finish_rows(const u64 *multiset, u64 *hashes, int count, int lanes, u64 nbytes) {
    for (EACH(row, count)) {
        u64 sum = mix(nbytes ^ LENGTH);
        for (int lane = 0; lane < lanes; ++lane) sum += multiset[row * lanes + lane];
        hashes[row] = mix(sum ^ LENGTH);
    }
}
