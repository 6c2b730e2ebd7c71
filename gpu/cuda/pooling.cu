// Max and average pooling over planes [P, H, W] to [P, OH, OW], with Caffe's borders.

// The largest value of each window, the first one of equals, NaN if there is one; index: its position y * width + x.
KERNEL max_pool(const float *x, float *y, int *index, int count, int height, int width, int oh, int ow,
                int kh, int kw, int sh, int sw, int ph, int pw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int ox = rest % ow; rest /= ow;
        const int oy = rest % oh;
        const float *plane = x + rest / oh * height * width;
        const int y0 = max(oy * sh - ph, 0), y1 = min(oy * sh - ph + kh, height);
        const int x0 = max(ox * sw - pw, 0), x1 = min(ox * sw - pw + kw, width);
        int where = y0 * width + x0;
        float best = plane[where];
        for (int h = y0; h < y1; ++h) {
            for (int w = x0; w < x1; ++w) {
                const float value = plane[h * width + w];
                if (value > best || (value != value && best == best)) {
                    best = value;
                    where = h * width + w;
                }
            }
        }
        y[at] = best;
        index[at] = where;
    }
}

// Each position of dx gathers the gradients of the windows whose maximum it was, in the order of the windows.
KERNEL max_pool_back(const float *dy, const int *index, float *dx, int count, int height, int width, int oh, int ow,
                     int kh, int kw, int sh, int sw, int ph, int pw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int w = rest % width; rest /= width;
        const int h = rest % height;
        const int start = rest / height * oh * ow, place = h * width + w;
        const int y0 = first_window(h + ph, kh, sh), y1 = min((h + ph) / sh + 1, oh);
        const int x0 = first_window(w + pw, kw, sw), x1 = min((w + pw) / sw + 1, ow);
        float sum = 0.0f;
        for (int oy = y0; oy < y1; ++oy)
            for (int ox = x0; ox < x1; ++ox)
                if (index[start + oy * ow + ox] == place) sum += dy[start + oy * ow + ox];
        dx[at] = sum;
    }
}

// Values a window is divided by: its size with the padding, cut off at H + pad.
INLINE float window_size(int top, int left, int kh, int kw, int bottom, int right) {
    return (float)((min(top + kh, bottom) - top) * (min(left + kw, right) - left));
}

KERNEL ave_pool(const float *x, float *y, int count, int height, int width, int oh, int ow,
                int kh, int kw, int sh, int sw, int ph, int pw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int ox = rest % ow; rest /= ow;
        const int oy = rest % oh;
        const float *plane = x + rest / oh * height * width;
        const int top = oy * sh - ph, left = ox * sw - pw;
        const int y1 = min(top + kh, height), x1 = min(left + kw, width);
        float sum = 0.0f;
        for (int h = max(top, 0); h < y1; ++h)
            for (int w = max(left, 0); w < x1; ++w) sum += plane[h * width + w];
        y[at] = sum / window_size(top, left, kh, kw, height + ph, width + pw);
    }
}

// The transpose, as a gather over the windows that a position lies in.
KERNEL ave_pool_back(const float *dy, float *dx, int count, int height, int width, int oh, int ow,
                     int kh, int kw, int sh, int sw, int ph, int pw) {
    for (EACH(at, count)) {
        int rest = (int)at;
        const int w = rest % width; rest /= width;
        const int h = rest % height;
        const int start = rest / height * oh * ow;
        const int y0 = first_window(h + ph, kh, sh), y1 = min((h + ph) / sh + 1, oh);
        const int x0 = first_window(w + pw, kw, sw), x1 = min((w + pw) / sw + 1, ow);
        float sum = 0.0f;
        for (int oy = y0; oy < y1; ++oy)
            for (int ox = x0; ox < x1; ++ox)
                sum += dy[start + oy * ow + ox] /
                       window_size(oy * sh - ph, ox * sw - pw, kh, kw, height + ph, width + pw);
        dx[at] = sum;
    }
}
