// Convolution with one input channel a group. Outputs c * each .. c * each + each - 1 belong to channel c.

// y[n * O, OH, OW] from x[n * C, H, W] and weight[O, kh, kw]; bias[O] counts if there is one.
KERNEL depthwise(const float *x, const float *weight, const float *bias, int has_bias, float *y, int count,
                 int outputs, int each, int height, int width, int oh, int ow,
                 int kh, int kw, int sh, int sw, int ph, int pw, int dh, int dw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int ox = rest % ow; rest /= ow;
        const int oy = rest % oh;
        const int plane = rest / oh, o = plane % outputs;
        const float *image = x + plane / each * height * width, *w = weight + o * kh * kw;
        float sum = has_bias ? bias[o] : 0.0f;
        for (int i = 0; i < kh; ++i) {
            const int h = oy * sh - ph + i * dh;
            if (h < 0 || h >= height) continue;
            for (int j = 0; j < kw; ++j) {
                const int v = ox * sw - pw + j * dw;
                if (v >= 0 && v < width) sum += w[i * kw + j] * image[h * width + v];
            }
        }
        y[at] = sum;
    }
}

// Gradient with respect to x[n * C, H, W], gathered over outputs, then kernel offsets.
KERNEL depthwise_back(const float *dy, const float *weight, float *dx, int count, int outputs, int each,
                      int height, int width, int oh, int ow,
                      int kh, int kw, int sh, int sw, int ph, int pw, int dh, int dw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int w = rest % width; rest /= width;
        const int h = rest % height;
        const int plane = rest / height;
        float sum = 0.0f;
        for (int m = 0; m < each; ++m) {
            const float *maps = dy + (plane * each + m) * oh * ow;
            const float *taps = weight + (plane * each + m) % outputs * kh * kw;
            for (int i = 0; i < kh; ++i) {
                const int y = h + ph - i * dh;
                if (y < 0 || y % sh || y / sh >= oh) continue;
                for (int j = 0; j < kw; ++j) {
                    const int v = w + pw - j * dw;
                    if (v < 0 || v % sw || v / sw >= ow) continue;
                    sum += taps[i * kw + j] * maps[y / sh * ow + v / sw];
                }
            }
        }
        dx[at] = sum;
    }
}

// Gradient with respect to weight[O, kh, kw], first part: sums[O, kh, kw, OW] over images and rows, column by column.
KERNEL depthwise_columns(const float *x, const float *dy, float *sums, int count, int planes, int outputs, int each,
                         int height, int width, int oh, int ow,
                         int kh, int kw, int sh, int sw, int ph, int pw, int dh, int dw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int ox = rest % ow; rest /= ow;
        const int j = rest % kw; rest /= kw;
        const int i = rest % kh;
        const int o = rest / kh;
        const int v = ox * sw - pw + j * dw;
        float sum = 0.0f;
        if (v >= 0 && v < width) {
            for (int plane = o; plane < planes; plane += outputs) {
                const float *image = x + plane / each * height * width, *maps = dy + plane * oh * ow;
                for (int oy = 0; oy < oh; ++oy) {
                    const int h = oy * sh - ph + i * dh;
                    if (h >= 0 && h < height) sum += maps[oy * ow + ox] * image[h * width + v];
                }
            }
        }
        sums[at] = sum;
    }
}

// Second part: the sum of each row of sums[count, width], from left to right.
KERNEL sum_rows(const float *sums, float *out, int count, int width) {
    for (EACH(at, count)) {
        float sum = 0.0f;
        for (int p = 0; p < width; ++p) sum += sums[at * width + p];
        out[at] = sum;
    }
}
