// Frames of a clip moved in time, in part (models/rolled.py).
#pragma once
#include <vector>

#include "rows.hpp"

namespace {

// Every `stride`-th pixel of x, whose frames are height x width, stored as the result is instead of as the shortcut is:
// around the clip's ends, or with `blank` zeros for what would come round them.
template <class T>
void move(const T* x, T* to, const Shape& s, int64_t height, int64_t width, int64_t stride, bool blank) {
    const int64_t C = s.channels, columns = (width + stride - 1) / stride;
    const bool stream = is_large<T>(s);
    const int64_t distance = rows_ahead<T>(C) * C;
    in_parallel(threads_for(s), s.rows() / columns, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t line = first; line < last; line++) {
            const int64_t frame = line * columns / s.pixels, t = frame % s.frames;
            const int64_t above = line % (s.pixels / columns) * stride * width; // pixels of the frame before this line's
            const T* from[MOST_SEGMENTS]; // null: zeros
            for (int64_t i = 0; i < s.num_segments; i++) {
                const int64_t source = t + s.segments[i].shortcut_step, there = frame - t + (source + s.frames) % s.frames;
                const bool nothing = blank && (source < 0 || source >= s.frames);
                from[i] = nothing ? nullptr : x + (there * height * width + above) * C + s.segments[i].begin;
            }
            for (int64_t column = 0; column < columns; column++)
                for (int64_t i = 0; i < s.num_segments; i++) {
                    const int64_t n = s.segments[i].end - s.segments[i].begin;
                    T* const out = to + (line * columns + column) * C + s.segments[i].begin;
                    if (!from[i]) {
                        write(out, n, stream, [](int64_t) { return A<T>(0); });
                        continue;
                    }
                    const T* const pixel = from[i] + column * stride * C;
                    announce(pixel, n, distance * stride);
                    write(out, n, stream, [=](int64_t j) { return load(pixel[j]); });
                }
        }
        written(stream);
    });
}

// What a thread has put away. Kept from one use to the next: taken anew each time it would cut the free memory into pieces
// that the next activation does not fit into.
struct Away {
    std::vector<unsigned char> bytes;
    bool full = false;
};

inline Away& away() {
    static thread_local Away mine;
    return mine;
}

// What came round the clips' ends in a rolled x is put away and made 0, or, with `back`, put back. False where something
// is away already, or nothing is to be put back.
template <class T> bool swap_ends(T* x, const Shape& s, bool back) {
    const int64_t C = s.channels, distance = rows_ahead<T>(C) * C;
    int64_t moving = 0; // channels of a pixel
    for (int64_t i = 0; i < s.num_segments; i++)
        if (s.segments[i].x_step) moving += s.segments[i].end - s.segments[i].begin;
    Away& mine = away();
    if (mine.full != back) return false;
    mine.full = !back;
    mine.bytes.resize(std::max<size_t>(mine.bytes.size(), s.clips * s.pixels * moving * sizeof(T)));
    T* const kept = reinterpret_cast<T*>(mine.bytes.data());
    in_parallel(threads_for(s), s.clips * s.pixels, [&](int64_t, int64_t first, int64_t last) {
        int64_t clip = first / s.pixels, pixel = first % s.pixels;
        for (int64_t row = first; row < last; row++) {
            T* beside = kept + row * moving;
            for (int64_t i = 0; i < s.num_segments; i++) {
                const Segment& g = s.segments[i];
                if (!g.x_step) continue;
                const int64_t n = g.end - g.begin, frame = clip * s.frames + (g.x_step > 0 ? s.frames - 1 : 0);
                T* const at = x + (frame * s.pixels + pixel) * C + g.begin;
                announce<true>(at, n, distance);
#pragma omp simd
                for (int64_t j = 0; j < n; j++) {
                    if (!back) beside[j] = at[j];
                    at[j] = back ? beside[j] : T{};
                }
                beside += n;
            }
            if (++pixel == s.pixels) pixel = 0, clip++;
        }
    });
    return true;
}

} // namespace
