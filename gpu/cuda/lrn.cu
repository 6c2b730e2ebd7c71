// Local response normalisation across channels of x[n, C, S] (S: height times width).

// s^beta; the usual 3/4 by two square roots, as the NumPy layer has it.
INLINE float lrn_power(float s, float beta) {
    if (beta == 0.75f) {
        const float root = sqrtf(s);
        return root * sqrtf(root);
    }
    return powf(s, beta);
}

// scale = base + alpha * sum of squares of the channels at most half away: the channel itself, then near to far.
KERNEL lrn_forward(const float *x, float *scale, float *y, int count, int channels, int size, int half,
                   float alpha, float base, float beta) {
    for (EACH(at, count)) {
        const int c = (int)at / size % channels;
        float sum = x[at] * x[at];
        for (int shift = 1; shift <= half; ++shift) {
            if (c + shift < channels) sum += x[at + shift * size] * x[at + shift * size];
            if (c >= shift) sum += x[at - shift * size] * x[at - shift * size];
        }
        sum *= alpha;
        sum += base;
        scale[at] = sum;
        y[at] = x[at] / lrn_power(sum, beta);
    }
}

// dx = dy * scale^-beta - factor * x * sum of dy * y / scale over the same channels; factor = 2 alpha beta.
KERNEL lrn_backward(const float *x, const float *y, const float *scale, const float *dy, float *dx, int count,
                    int channels, int size, int half, float factor, float beta) {
    for (EACH(at, count)) {
        const int c = (int)at / size % channels;
        float sum = dy[at] * y[at] / scale[at];
        for (int shift = 1; shift <= half; ++shift) {
            const i64 far = at + shift * size, near = at - shift * size;
            if (c + shift < channels) sum += dy[far] * y[far] / scale[far];
            if (c >= shift) sum += dy[near] * y[near] / scale[near];
        }
        sum *= x[at];
        sum *= factor;
        dx[at] = dy[at] / lrn_power(scale[at], beta) - sum;
    }
}
