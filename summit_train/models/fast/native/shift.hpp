// The temporal shift in place (Lin et al., "TSM", section 3): a quarter of a copy's traffic, and no memory.
#pragma once
#include <cstring>

#include "rows.hpp"

namespace {

// Clips of `frames` frames, each `pixels` rows of `channels` channels.
struct Clips {
    int64_t clips, frames, pixels, channels, threads;
};

// Channels [begin, end); those of frame t + step (1 or -1) go to frame t.
struct Group {
    int64_t begin, end, step;
};

constexpr int64_t PIXELS = 64; // pixels that are moved through all frames before the next ones

// Move a group of the channels of n pixels through the frames. `x` and `end` are at the first pixel's channel.
template <class T, bool RESTORE>
void shift_pixels(T* x, T* end, int64_t pitch, int64_t n, const Group& g, const Clips& s) {
    const int64_t frame = s.pixels * s.channels, bytes = (g.end - g.begin) * int64_t(sizeof(T));
    const auto each = [&](auto copy) {
        for (int64_t p = 0; p < n; p++) copy(p * s.channels, p * pitch);
    };
    T *at = x + (g.step > 0 ? 0 : s.frames - 1) * frame, *const opened = x + (g.step > 0 ? s.frames - 1 : 0) * frame;
    if (end && !RESTORE) each([&](int64_t row, int64_t kept) { std::memcpy(end + kept, at + row, bytes); });
    for (; at != opened; at += g.step * frame)
        each([&](int64_t row, int64_t) { std::memcpy(at + row, at + g.step * frame + row, bytes); });
    if (end && RESTORE)
        each([&](int64_t row, int64_t kept) { std::memcpy(at + row, end + kept, bytes); });
    else
        each([&](int64_t row, int64_t) { std::memset(at + row, 0, bytes); });
}

// Shift groups of channels, in place. What drops out of a clip goes to `ends` (clips * pixels rows, the groups side by
// side), and what opens becomes zero. With RESTORE what opens comes from `ends` instead. Without `ends` what drops out
// is lost.
template <class T, bool RESTORE>
void shift(T* x, T* ends, const Group* groups, int64_t num_groups, const Clips& s) {
    int64_t pitch = 0;
    for (int64_t i = 0; i < num_groups; i++) pitch += groups[i].end - groups[i].begin;
    const int64_t blocks = (s.pixels + PIXELS - 1) / PIXELS, count = s.clips * blocks;
    const int64_t workers = count * PIXELS * s.frames * pitch < SMALL ? 1 : std::clamp<int64_t>(s.threads, 1, count);
    in_parallel(workers, count, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t b = first; b < last; b++) {
            const int64_t clip = b / blocks, pixel = b % blocks * PIXELS, n = std::min(PIXELS, s.pixels - pixel);
            T* const at = x + (clip * s.frames * s.pixels + pixel) * s.channels;
            T* end = ends ? ends + (clip * s.pixels + pixel) * pitch : nullptr;
            for (int64_t i = 0; i < num_groups; i++) {
                const Group& g = groups[i];
                shift_pixels<T, RESTORE>(at + g.begin, end, pitch, n, g, s);
                if (end) end += g.end - g.begin;
            }
        }
    });
}

} // namespace
