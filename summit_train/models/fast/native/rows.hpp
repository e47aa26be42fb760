// Activations with their channels last, as rows of channels: number formats, threads, and writes past the caches.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

// The type that numbers of type T are computed in.
template <class T> struct compute { using type = T; };
template <> struct compute<bf16> { using type = float; };
template <class T> using A = typename compute<T>::type;

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

inline void store(float& to, float x) { to = x; }
inline void store(double& to, double x) { to = x; }
inline void store(bf16& to, float x) { // round to nearest, ties to even; keep a NaN
    const uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40;
    to.bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

constexpr int64_t SMALL = 1 << 15;       // elements that are not worth a second thread
constexpr int64_t BLOCK_BYTES = 1 << 17; // of x that stay in a core's cache between two readings
constexpr int64_t AHEAD_BYTES = 1 << 12; // distance of a prefetch
constexpr int64_t STREAMED = 1 << 22;    // bytes from which a result is written past the caches

// rows x channels elements, and the threads that share them.
struct Shape {
    int64_t rows, channels, threads;

    int64_t workers() const { return rows * channels < SMALL ? 1 : std::clamp<int64_t>(threads, 1, rows); }

    template <class T> bool is_large() const { return rows * channels * int64_t(sizeof(T)) >= STREAMED; }
};

// Call each(worker, first, last + 1) on an equal share of `count` items per worker.
template <class F> void in_parallel(int64_t workers, int64_t count, F each) {
#pragma omp parallel for num_threads(workers) schedule(static, 1) if (workers > 1)
    for (int64_t w = 0; w < workers; w++) each(w, count * w / workers, count * (w + 1) / workers);
}

// Prefetch the row that is read soon. The processor sees the stream by itself, and still it comes sooner when asked for.
template <class T> inline void prefetch(const T* row, int64_t C) {
    constexpr int64_t LINE = 64 / sizeof(T);
    const int64_t rows = std::clamp<int64_t>(AHEAD_BYTES / int64_t(C * sizeof(T)), 2, 16);
    for (int64_t c = 0; c < C; c += LINE) __builtin_prefetch(row + rows * C + c);
}

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

// to[c] = f(c). A large result goes past the caches (`stream`): it would leave them before anybody reads it, and a line
// that is written whole need not be read first.
template <class T, class F> inline void write(T* to, int64_t n, bool stream, F f) {
#ifdef __SSE2__
    constexpr int64_t LINE = 64 / sizeof(T);
    if (stream && n % LINE == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t done = 0; done < n; done += LINE) {
            alignas(64) T line[LINE];
#pragma omp simd
            for (int64_t j = 0; j < LINE; j++) store(line[j], f(done + j));
            stream_line(to + done, line);
        }
        return;
    }
#endif
#pragma omp simd
    for (int64_t c = 0; c < n; c++) store(to[c], f(c));
}

// Order streamed writes before what follows.
inline void written(bool stream) {
#ifdef __SSE2__
    if (stream) _mm_sfence();
#endif
}

} // namespace
