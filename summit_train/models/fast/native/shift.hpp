// The temporal shift in place (Lin et al., "TSM", section 3): a quarter of a copy's traffic, and no memory.
#pragma once
#include <cstring>

#include "rows.hpp"

namespace {

// Clips of `frames` frames, each `pixels` rows of `channels` channels.
struct Clips {
    int64_t clips, frames, pixels, channels, threads;
};

constexpr int64_t PIXELS = 64; // pixels that are moved through all frames before the next ones

// Move channels [begin, begin + width) of every frame t + step to frame t, in place. The frame that drops out goes to
// `ends` (clips * pixels rows of `pitch` channels) and the frame that opens becomes zero. With RESTORE the frame that
// opens comes from `ends` instead. Without `ends` what drops out is lost.
template <class T, bool RESTORE>
void shift_group(T* x, T* ends, int64_t pitch, int64_t begin, int64_t width, int64_t step, const Clips& s) {
    const int64_t frame = s.pixels * s.channels, bytes = width * int64_t(sizeof(T));
    const int64_t dropped = step > 0 ? 0 : s.frames - 1, opened = s.frames - 1 - dropped;
    const int64_t blocks = (s.pixels + PIXELS - 1) / PIXELS, count = s.clips * blocks;
    const int64_t workers = s.clips * s.frames * s.pixels * width < SMALL ? 1 : std::clamp<int64_t>(s.threads, 1, count);
    in_parallel(workers, count, [&](int64_t, int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t clip = i / blocks, pixel = i % blocks * PIXELS, n = std::min(PIXELS, s.pixels - pixel);
            T* const first = x + clip * s.frames * frame + pixel * s.channels + begin;
            T* const end = ends ? ends + (clip * s.pixels + pixel) * pitch : nullptr;
            const auto each = [&](auto copy) {
                for (int64_t p = 0; p < n; p++) copy(p * s.channels, p * pitch);
            };
            T* at = first + dropped * frame;
            if (end && !RESTORE) each([&](int64_t row, int64_t kept) { std::memcpy(end + kept, at + row, bytes); });
            for (; at != first + opened * frame; at += step * frame)
                each([&](int64_t row, int64_t) { std::memcpy(at + row, at + step * frame + row, bytes); });
            if (end && RESTORE)
                each([&](int64_t row, int64_t kept) { std::memcpy(at + row, end + kept, bytes); });
            else
                each([&](int64_t row, int64_t) { std::memset(at + row, 0, bytes); });
        }
    });
}

} // namespace
