// Loops in the widest vectors that a machine has.
#pragma once

// In front of a function that is no template: compiled for each, chosen when the library is loaded. All give
// the same bits, as the build contracts nothing.
#if defined(__x86_64__)
#define BAGUARUN_CLONES [[gnu::target_clones("avx512f", "avx2", "default")]]
#else
#define BAGUARUN_CLONES
#endif
