// Unrolled windows: im2col and its transpose, each as a gather.

// x[n, C, H, W] to col[C, kh, kw, n, OH, OW]; positions in the padding are 0.
KERNEL im2col(const float *x, float *col, int count, int n, int channels, int height, int width, int oh, int ow,
              int kh, int kw, int sh, int sw, int ph, int pw, int dh, int dw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int ox = rest % ow; rest /= ow;
        const int oy = rest % oh; rest /= oh;
        const int b = rest % n; rest /= n;
        const int j = rest % kw; rest /= kw;
        const int i = rest % kh;
        const int c = rest / kh;
        const int h = oy * sh - ph + i * dh, w = ox * sw - pw + j * dw;
        const bool inside = h >= 0 && h < height && w >= 0 && w < width;
        col[at] = inside ? x[((b * channels + c) * height + h) * width + w] : 0.0f;
    }
}

// The transpose: each position of x[n, C, H, W] is the sum, in the order of the kernel's offsets, of what was read there.
KERNEL col2im(const float *col, float *x, int count, int n, int channels, int height, int width, int oh, int ow,
              int kh, int kw, int sh, int sw, int ph, int pw, int dh, int dw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int w = rest % width; rest /= width;
        const int h = rest % height; rest /= height;
        const int c = rest % channels;
        const int b = rest / channels;
        float sum = 0.0f;
        for (int i = 0; i < kh; ++i) {
            const int y = h + ph - i * dh;
            if (y < 0 || y % sh || y / sh >= oh) continue;
            for (int j = 0; j < kw; ++j) {
                const int v = w + pw - j * dw;
                if (v < 0 || v % sw || v / sw >= ow) continue;
                sum += col[((((c * kh + i) * kw + j) * n + b) * oh + y / sh) * ow + v / sw];
            }
        }
        x[at] = sum;
    }
}
