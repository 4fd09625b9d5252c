// How the ranks of a communicator find each other.
#pragma once

#include <memory>

#include "net/communicator.h"
#include "net/control.h"
#include "net/host_map.h"
#include "net/mesh.h"
#include "net/shm_group.h"

namespace baguarun::net {

// What a rank has once all have met.
struct Meeting {
  HostMap map;
  std::unique_ptr<ShmGroup> shm;     // nullptr: alone on its host
  std::unique_ptr<Mesh> mesh;        // nullptr: all are on one host
  std::unique_ptr<Control> control;  // as `mesh`
};

// All ranks call it. Throws Error on every rank where one of them fails: kUsage, kRemote, kTimeout, kSystem.
Meeting meet(const Communicator::Options& options, const BlobExchange& exchange);

}  // namespace baguarun::net
