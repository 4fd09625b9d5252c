#include "elastic/known_values.h"

#include <cstddef>

namespace baguarun::elastic {

namespace {

// Calls `take` with the dicts, their keys and values one after the other, until it returns false.
template <class Take>
void forAll(const std::vector<pybind11::dict>& dicts, Take take) {
  for (const pybind11::dict& dict : dicts) {
    if (!take(dict)) {
      return;
    }
    for (const auto& [key, value] : dict) {
      if (!take(key) || !take(value)) {
        return;
      }
    }
  }
}

}  // namespace

bool KnownValues::are(const std::vector<pybind11::dict>& dicts) {
  size_t numSame = 0;
  size_t numSeen = 0;
  forAll(dicts, [&](pybind11::handle object) {
    ++numSeen;
    numSame += numSame < known_.size() && known_[numSame].is(object);
    return numSame == numSeen;
  });
  if (numSame == numSeen && numSame == known_.size() && numSeen > 0) {
    return true;
  }
  known_.clear();
  forAll(dicts, [&](pybind11::handle object) {
    known_.push_back(pybind11::reinterpret_borrow<pybind11::object>(object));
    return true;
  });
  return false;
}

pybind11::list valuesIn(const std::vector<pybind11::dict>& dicts) {
  pybind11::list found;
  for (const pybind11::dict& dict : dicts) {
    for (const auto& [key, value] : dict) {
      if (!value.is_none()) {
        found.append(value);
      }
    }
  }
  return found;
}

}  // namespace baguarun::elastic
