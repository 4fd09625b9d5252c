#include "net/wire_call.h"

#include <algorithm>

#include "net/error.h"
#include "net/fail_point.h"

namespace baguarun::net {

WireCall::WireCall(WireContext& context, const std::vector<int>& members, size_t place,
                   const CallTrail& trail)
    : context_(context), members_(members), place_(place), trail_(trail), peers_(members.size()) {}

void WireCall::noteToAll(uint64_t note, uint64_t alike, const char* setting) {
  alike_ = alike;
  setting_ = setting;
  for (Peer& peer : peers_) {
    peer.note = note;
  }
}

void WireCall::use(size_t member) {
  NET_CHECK(member != place_ && member < members_.size());
  if (!peers_[member].isActive) {
    peers_[member].isActive = true;
    active_.push_back(member);
    context_.mesh().want(Mesh::Use::kCollectives, members_[member]);
  }
}

void WireCall::greet(size_t to) {
  use(to);
  Peer& peer = peers_[to];
  if (!peer.isGreeted) {
    peer.isGreeted = true;
    peer.ours = {.trail = trail_, .note = peer.note};
    peer.sends.push_back({reinterpret_cast<std::byte*>(&peer.ours), sizeof(Header), nullptr});
  }
}

void WireCall::send(size_t to, const void* data, size_t bytes) {
  greet(to);
  peers_[to].sends.push_back({static_cast<std::byte*>(const_cast<void*>(data)), bytes, nullptr});
}

void WireCall::expect(size_t from) {
  use(from);
  Peer& peer = peers_[from];
  if (!peer.isExpected) {
    peer.isExpected = true;
    peer.receives.push_back({reinterpret_cast<std::byte*>(&peer.theirs), sizeof(Header), nullptr});
  }
}

void WireCall::receive(size_t from, void* data, size_t bytes) {
  expect(from);
  peers_[from].receives.push_back({static_cast<std::byte*>(data), bytes, nullptr});
}

bool WireCall::advance() {
  bool moved = false;
  for (const size_t member : active_) {
    Peer& peer = peers_[member];
    if (peer.sends.empty() && peer.receives.empty()) {
      continue;
    }
    if (Link* const link = context_.mesh().find(Mesh::Use::kCollectives, members_[member])) {
      moved |= advanceSends(member, peer, *link);
      moved |= advanceReceives(member, peer, *link);
    }
  }
  return moved;
}

bool WireCall::advanceSends(size_t member, Peer& peer, Link& link) {
  bool moved = false;
  while (!peer.sends.empty() && peer.sends.front().request != nullptr &&
         peer.sends.front().request->isDone()) {
    const Item& item = peer.sends.front();
    link.test(item.request);
    const bool isHeader = item.data == reinterpret_cast<std::byte*>(&peer.ours);
    peer.sends.pop_front();
    --peer.postedSends;
    peer.numSent += isHeader ? 0 : 1;
    moved = true;
  }
  while (peer.postedSends < peer.sends.size()) {
    Item& item = peer.sends[peer.postedSends];
    if (FailPoint::ofProcess().holdsBack(item.bytes)) {
      if (peer.postedSends == 0) {
        FailPoint::die();
      }
      // Those before it leave first.
      break;
    }
    item.request = link.isend(item.data, item.bytes);
    if (item.request == nullptr) {
      break;
    }
    FailPoint::ofProcess().posted(item.bytes);
    ++peer.postedSends;
    context_.mesh().poke(Mesh::Use::kCollectives, members_[member], item.bytes);
    moved = true;
  }
  return moved;
}

bool WireCall::advanceReceives(size_t member, Peer& peer, Link& link) {
  bool moved = false;
  while (!peer.receives.empty() && peer.receives.front().request != nullptr &&
         peer.receives.front().request->isDone()) {
    const Item item = peer.receives.front();
    const size_t bytes = link.test(item.request).bytes;
    if (bytes != item.bytes) {
      throw Error(Fault::kUsage, link.peer(),
                  "sent " + std::to_string(bytes) + " bytes where " + std::to_string(item.bytes) +
                      " are wanted, in " + trail_.call.text());
    }
    peer.receives.pop_front();
    --peer.postedReceives;
    if (peer.isKnown) {
      ++peer.numReceived;
    } else {
      checkHeader(member, peer);
    }
    moved = true;
  }
  // What comes behind a header is taken when the header is right.
  const size_t limit = peer.isKnown ? peer.receives.size() : std::min<size_t>(1, peer.receives.size());
  while (peer.postedReceives < limit) {
    Item& item = peer.receives[peer.postedReceives];
    item.request = link.irecv(item.data, item.bytes);
    if (item.request == nullptr) {
      break;
    }
    ++peer.postedReceives;
    context_.mesh().poke(Mesh::Use::kCollectives, members_[member], 0);
    moved = true;
  }
  return moved;
}

void WireCall::checkHeader(size_t member, Peer& peer) {
  const CallTrail& theirs = peer.theirs.trail;
  if (theirs != trail_) {
    // The mistake may be older than this call.
    const std::string us = context_.mesh().name(members_[place_]);
    const auto known = difference(theirs, context_.ownTrail(theirs.call.sequence), us);
    throw Error(
        Fault::kUsage, context_.mesh().name(members_[member]),
        known.value_or("calls " + theirs.call.text() + ", where " + us + " calls " + trail_.call.text()));
  }
  if (((peer.theirs.note ^ peer.note) & alike_) != 0) {
    throw Error(
        Fault::kUsage, context_.mesh().name(members_[member]),
        "goes another way in " + trail_.call.text() + "; want the same " + setting_ + " on all ranks");
  }
  peer.isKnown = true;
}

bool WireCall::isAllPosted() const noexcept {
  return std::ranges::all_of(peers_, [](const Peer& peer) {
    return peer.postedSends == peer.sends.size() && peer.postedReceives == peer.receives.size();
  });
}

void WireCall::pass(size_t from) {
  if (!advance()) {
    context_.await(members_[from]);
  }
}

void WireCall::waitSent(size_t to, size_t count) {
  while (peers_[to].numSent < count) {
    pass(to);
  }
}

void WireCall::waitReceived(size_t from, size_t count) {
  while (peers_[from].numReceived < count) {
    pass(from);
  }
}

uint64_t WireCall::waitNote(size_t from) {
  expect(from);
  while (!peers_[from].isKnown) {
    pass(from);
  }
  return peers_[from].theirs.note;
}

void WireCall::finish() {
  for (size_t i = 0; i < active_.size(); ++i) {
    const size_t member = active_[i];
    while (!peers_[member].sends.empty() || !peers_[member].receives.empty()) {
      pass(member);
    }
  }
}

}  // namespace baguarun::net
