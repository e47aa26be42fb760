// Frames of a clip stored otherwise (models/stream.py), as a pass of its own.
#pragma once
#include "rows.hpp"

namespace {

// Every `stride`-th pixel of x, whose frames are height x width, stored as the result is instead of as the shortcut is.
// Where x has no ends they are zeros; where `to` has none, what falls out is lost.
template <class T>
void move(Stream<const T> x, Stream<T> to, const Shape& s, int64_t height, int64_t width, int64_t stride) {
    const int64_t C = s.channels, columns = (width + stride - 1) / stride, lines = s.pixels / columns;
    const bool stream = is_large<T>(s);
    const int64_t ahead = rows_ahead<T>(C);
    const auto zero = [](int64_t) { return A<T>(0); };
    Shape whole = s;
    whole.pixels = height * width;
    const auto copy = [&](const Place& in, const Place& out, int64_t n) {
        const T* const from = in.outside && !x.ends ? nullptr : x.at(in);
        T* const there = out.outside && !to.ends ? nullptr : to.at(out);
        if (from) announce(from, n, ahead * stride * in.pitch);
        if (out.outside) write(to.frames + out.blank, n, stream, zero);
        if (there && from) write(there, n, stream && !out.outside, [=](int64_t j) { return load(from[j]); });
        if (there && !from) write(there, n, stream && !out.outside, zero);
    };
    const auto copy_line = [&](int64_t clip, int64_t stored, int64_t line) {
        Place in[MOST_SEGMENTS], out[MOST_SEGMENTS];
        for (int64_t k = 0; k < s.num_segments; k++) {
            const Segment& g = s.segments[k];
            const int64_t t = (stored - g.after + s.frames) % s.frames;
            in[k] = place_of(whole, g, clip, t + g.before, line * stride * width, s.before_ends);
            out[k] = place_of(s, g, clip, t + g.after, line * columns, s.after_ends);
        }
        for (int64_t column = 0; column < columns; column++)
            for (int64_t k = 0; k < s.num_segments; k++) {
                copy(in[k], out[k], s.segments[k].end - s.segments[k].begin);
                in[k].at += in[k].pitch * stride;
                out[k].at += out[k].pitch, out[k].blank += C;
            }
    };
    in_parallel(threads_for(s), s.clips * s.frames * lines, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) copy_line(i / lines / s.frames, i / lines % s.frames, i % lines);
        written(stream);
    });
}

} // namespace
