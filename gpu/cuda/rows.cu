// The sum of picked rows, where a scatter would need atomics. Picks are sorted by row: those of row r are
// order[start[r]] .. order[start[r + 1] - 1], in the order in which they were made.
KERNEL sum_picks(const float *picked, const i64 *order, const i64 *start, float *into, int count, int width) {
    for (EACH(at, count)) {
        const int row = (int)at / width, column = (int)at % width;
        float sum = 0.0f;
        for (i64 pick = start[row]; pick < start[row + 1]; ++pick) sum += picked[order[pick] * width + column];
        into[at] = sum;
    }
}
