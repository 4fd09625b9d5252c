#include "elastic/pages.h"

#include <unistd.h>

namespace baguarun::elastic {

void ownPages(uintptr_t address, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (uintptr_t where = address; where < address + bytes; where = (where / page + 1) * page) {
    auto* const byte = reinterpret_cast<volatile unsigned char*>(where);
    *byte = *byte;
  }
}

}  // namespace baguarun::elastic
