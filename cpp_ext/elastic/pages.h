// Pages of memory that a process will write to at a moment when others wait for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baguarun::elastic {

// Has this process own all pages of memory from `address` on: writes to each what it holds. New memory has
// none yet; what was there when a child was forked shares them with it, and is copied page by page when it is
// written first.
//
// Not asked for as large pages, which were to be found for a newcomer's 100 MB in 12 to 60 ms of CPU time,
// small ones in 12 to 18.
//
// Threads: any, while nobody else writes there.
void ownPages(uintptr_t address, size_t bytes);

}  // namespace baguarun::elastic
