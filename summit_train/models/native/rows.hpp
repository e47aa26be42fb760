// Activations as rows of channels: how their numbers are stored, walked over, shared between threads and written.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

// Channels [begin, end) of a frame t: the shortcut has them stored in frame t + before, the result in frame t + after.
struct Segment {
    int64_t begin, end, before, after;
};

// Also read by Python: kernels.py has the same fields in the same order.
struct Shape {
    int64_t clips, frames, pixels, channels;
    int64_t before_ends, after_ends; // channels of what fell out of the shortcut's clips, and of the result's
    const Segment* segments;
    int64_t num_segments;
    int64_t threads;

    int64_t rows() const { return clips * frames * pixels; }
};

// Where a segment of a pixel's channels is in a stream: in its frames or, outside the clip, in its ends. The frames then
// have zeros, at `blank`.
struct Place {
    int64_t at, pitch, blank;
    bool outside;
};

// A stream as it is stored. `ends`: what fell out of the clips, rows of fewer channels; null where nothing is wanted of it.
template <class T> struct Stream {
    T *frames, *ends;

    T* at(const Place& place) const { return (place.outside ? ends : frames) + place.at; }
};

struct bf16 {
    uint16_t bits;
};

// What a stored number is computed in.
template <class T> struct compute { using type = T; };
template <> struct compute<bf16> { using type = float; };
template <class T> using A = typename compute<T>::type;

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

inline void store(float& to, float x) { to = x; }
inline void store(double& to, double x) { to = x; }
inline void store(bf16& to, float x) { // to the nearest, halves to the even one; a NaN stays one
    const uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40;
    to.bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

// ---------------------------------------------------------------------------------------------- threads and rows

constexpr int64_t SMALL = 1 << 15;       // elements that are not worth a second thread
constexpr int64_t BLOCK_BYTES = 1 << 17; // of x, that stay in a core's cache between two readings
constexpr int64_t TILE_BYTES = 1 << 19;  // of x; as much of each other activation
constexpr int64_t AHEAD_BYTES = 1 << 12;
constexpr int64_t STREAMED = 1 << 22;    // bytes from which a result goes past the caches, which have others to keep

int64_t threads_for(const Shape& s) {
    return s.rows() * s.channels < SMALL ? 1 : std::max<int64_t>(1, std::min(s.threads, s.rows()));
}

// each(thread, first, last + 1) of `count` on as many threads as `threads`.
template <class F> void in_parallel(int64_t threads, int64_t count, F each) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
        for (int64_t t = 0; t < threads; t++) each(t, count * t / threads, count * (t + 1) / threads);
        return;
    }
#endif
    for (int64_t t = 0; t < threads; t++) each(t, count * t / threads, count * (t + 1) / threads);
}

// A segment of the channels of a pixel, in x (and all that has its frames in their places), shortcut and result.
struct Piece {
    int64_t begin, width;
    int64_t x;
    Place shortcut, result;
};

constexpr int64_t MOST_SEGMENTS = 8; // two rolls cut the channels into five

// The rows of some pixels in all frames of a clip, so few that they stay in a core's cache: what another frame of the clip
// has to give is then read while it is near.
struct Tiles {
    int64_t pixels, of_a_clip, count;

    template <class T> static Tiles of(const Shape& s) {
        const int64_t fit = TILE_BYTES / int64_t(s.channels * s.frames * sizeof(T));
        const int64_t pixels = std::max<int64_t>(1, std::min(s.pixels, fit)), of_a_clip = (s.pixels + pixels - 1) / pixels;
        return {pixels, of_a_clip, s.clips * of_a_clip};
    }
};

// A segment of row `row` of a clip's frames, frame `t` of which is where the stream would have it.
inline Place place_of(const Shape& s, const Segment& g, int64_t clip, int64_t t, int64_t row, int64_t ends) {
    const auto in_frame = [&](int64_t frame) { return ((clip * s.frames + frame) * s.pixels + row) * s.channels + g.begin; };
    const int64_t inside = (t + s.frames) % s.frames;
    if (t == inside) return {in_frame(t), s.channels, 0, false};
    return {(clip * s.pixels + row) * ends + g.begin, ends, in_frame(inside), true};
}

enum class Order { x, shortcut, result };

// each(piece) for all rows of a tile, a frame after the other, as x, the shortcut or the result has them in memory.
template <Order ORDER, class F> inline void over_pieces(const Shape& s, const Tiles& tiles, int64_t tile, F each) {
    const int64_t C = s.channels, n = s.num_segments, clip = tile / tiles.of_a_clip;
    const int64_t first = tile % tiles.of_a_clip * tiles.pixels, last = std::min(s.pixels, first + tiles.pixels);
    Piece pieces[MOST_SEGMENTS];
    for (int64_t stored = 0; stored < s.frames; stored++) {
        for (int64_t i = 0; i < n; i++) {
            const Segment& g = s.segments[i];
            const int64_t moved = ORDER == Order::x ? 0 : ORDER == Order::shortcut ? g.before : g.after;
            const int64_t t = (stored - moved + s.frames) % s.frames; // the frame that it belongs to
            pieces[i] = {g.begin, g.end - g.begin, ((clip * s.frames + t) * s.pixels + first) * C + g.begin,
                         place_of(s, g, clip, t + g.before, first, s.before_ends),
                         place_of(s, g, clip, t + g.after, first, s.after_ends)};
        }
        for (int64_t row = first; row < last; row++)
            for (int64_t i = 0; i < n; i++) {
                Piece& p = pieces[i];
                each(p);
                p.x += C;
                for (Place* place : {&p.shortcut, &p.result}) place->at += place->pitch, place->blank += C;
            }
    }
}

// How many rows ahead to ask for what is read.
template <class T> int64_t rows_ahead(int64_t channels) {
    return std::clamp<int64_t>(AHEAD_BYTES / int64_t(channels * sizeof(T)), 2, 16);
}

// Ask for what is read soon. Short pieces of another frame, a row apart, are no stream that the processor would see
// coming; rows one after the other are, and still come a fifth to a third sooner (16-bit numbers) when asked for.
template <class T> inline void announce(const T* piece, int64_t width, int64_t distance) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t j = 0; j < width; j += LINE) __builtin_prefetch(piece + distance + j);
}

// A line past the caches.
#ifdef __SSE2__
inline void stream_line(void* to, const void* from) {
#if defined __AVX512F__
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
#elif defined __AVX__
    for (int i = 0; i < 2; i++)
        _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
#else
    for (int i = 0; i < 4; i++)
        _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
#endif
}
#endif

// to[j] = f(j). Large results go past the caches: they are out of them before anybody reads them, and a line that is
// written whole need not be read first.
template <class T, class F> inline void write(T* to, int64_t n, bool stream, F f) {
#ifdef __SSE2__
    constexpr int64_t LINE = 64 / sizeof(T);
    if (stream && n % LINE == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t done = 0; done < n; done += LINE) { // of a length that the compiler knows: short pieces are many
            alignas(64) T line[LINE];
#pragma omp simd
            for (int64_t j = 0; j < LINE; j++) store(line[j], f(done + j));
            stream_line(to + done, line);
        }
        return;
    }
#endif
#pragma omp simd
    for (int64_t j = 0; j < n; j++) store(to[j], f(j));
}

// A row as it is, that begins with a line.
template <class T> inline void write_row(T* to, const T* row, int64_t n, bool stream) {
#ifdef __SSE2__
    constexpr int64_t LINE = 64 / sizeof(T);
    if (stream && n % LINE == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t done = 0; done < n; done += LINE) stream_line(to + done, row + done);
        return;
    }
#endif
    std::copy_n(row, n, to);
}

template <class T> bool is_large(const Shape& s) { return s.rows() * s.channels * int64_t(sizeof(T)) >= STREAMED; }

inline void written(bool stream) {
#ifdef __SSE2__
    if (stream) _mm_sfence();
#endif
}

} // namespace
