// Frames of a clip stored otherwise (models/rolled.py), as a pass of its own.
#pragma once
#include <vector>

#include "rows.hpp"

namespace {

// Every `stride`-th pixel of x, whose frames are height x width, stored as the result is instead of as the shortcut is.
// The ends of x are of these pixels; without them they are zeros. Where `to` has none, what falls out is lost. Rows are
// put together in the cache and written whole.
template <class T>
void move(Stream<const T> x, Stream<T> to, const Shape& s, int64_t height, int64_t width, int64_t stride) {
    const int64_t C = s.channels, columns = (width + stride - 1) / stride, lines = s.pixels / columns;
    const int64_t ahead = rows_ahead<T>(C);
    const bool stream = is_large<T>(s);
    Shape whole = s;
    whole.pixels = height * width;
    const auto move_line = [&](int64_t clip, int64_t stored, int64_t line, T* row) {
        Place in[MOST_SEGMENTS], out[MOST_SEGMENTS];
        for (int64_t k = 0; k < s.num_segments; k++) {
            const Segment& g = s.segments[k];
            const int64_t t = (stored - g.after + s.frames) % s.frames;
            in[k] = place_of(s, g, clip, t + g.before, line * columns, s.before_ends);
            if (!in[k].outside) {
                in[k] = place_of(whole, g, clip, t + g.before, line * stride * width, s.before_ends);
                in[k].pitch *= stride;
            }
            out[k] = place_of(s, g, clip, t + g.after, line * columns, s.after_ends);
        }
        T* result = to.frames + ((clip * s.frames + stored) * s.pixels + line * columns) * C;
        for (int64_t column = 0; column < columns; column++, result += C) {
            for (int64_t k = 0; k < s.num_segments; k++) {
                const int64_t begin = s.segments[k].begin, n = s.segments[k].end - begin;
                const T* const from = in[k].outside && !x.ends ? nullptr : x.at(in[k]);
                if (from) announce(from, n, ahead * in[k].pitch);
                if (out[k].outside) std::fill_n(row + begin, n, T{});
                T* const there = !out[k].outside ? row + begin : to.ends ? to.at(out[k]) : nullptr;
                if (there && from) std::copy_n(from, n, there);
                if (there && !from) std::fill_n(there, n, T{});
                in[k].at += in[k].pitch;
                out[k].at += out[k].pitch;
            }
            write_row(result, row, C, stream);
        }
    };
    in_parallel(threads_for(s), s.clips * s.frames * lines, [&](int64_t, int64_t first, int64_t last) {
        std::vector<T> room(C + 64 / sizeof(T)); // for a row that begins with a line
        T* const row = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
        for (int64_t i = first; i < last; i++) move_line(i / lines / s.frames, i / lines % s.frames, i % lines, row);
        written(stream);
    });
}

} // namespace
