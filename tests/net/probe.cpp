// Pure functions of the transport on the command line; what they print is compared in Python.
//
//   probe choose nccl|gloo < INTERFACES   lines "NAME ADDRESS PREFIX up|down"; the environment says the rules
//   probe speed SYSFS NAME                megabit/s and the path of the device
//   probe host                            what tells this host from others
//   probe hmac KEY MESSAGE                both in hexadecimal
//   probe address TEXT                    the address as understood
//   probe streams ALL < OBSERVATIONS      streams in use after each of the lines
//   "MILLISECONDS QUEUEING_US limited|held|free RATE MEASURED_MS"
//   probe distance MEMBERS < CALLS        in each line a call's bytes and, of every member, the trip in
//   microseconds and the bytes per second; for each call what every member makes of it, 1 for a direct one
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "net/distance.h"
#include "net/env.h"
#include "net/host_map.h"
#include "net/interfaces.h"
#include "net/sha256.h"
#include "net/stream_count.h"

namespace {

using namespace baguarun::net;
using Words = std::vector<std::string>;

void choose(const Words& words) {
  std::vector<Interface> all;
  std::string name;
  std::string address;
  int prefixBits = 0;
  std::string state;
  while (std::cin >> name >> address >> prefixBits >> state) {
    all.push_back(
        {.name = name, .address = Address::parse(address), .prefixBits = prefixBits, .isUp = state == "up"});
  }
  const Env env = Env::read();
  for (const Interface& chosen : words.at(0) == "nccl" ? chooseForNccl(all, env) : chooseForGloo(all, env)) {
    std::cout << chosen.name << " " << chosen.address.toString() << "\n";
  }
}

std::vector<uint8_t> unhex(const std::string& text) {
  std::vector<uint8_t> bytes;
  for (size_t index = 0; index + 1 < text.size(); index += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoul(text.substr(index, 2), nullptr, 16)));
  }
  return bytes;
}

void hmac(const Words& words) {
  for (const uint8_t byte : hmacSha256(unhex(words.at(0)), unhex(words.at(1)))) {
    std::printf("%02x", byte);
  }
}

void speed(const Words& words) {
  std::cout << interfaceSpeedMbps(words.at(1), words.at(0)) << " "
            << interfacePciPath(words.at(1), words.at(0));
}

void host(const Words& /*words*/) { std::cout << hostIdentity(); }

void address(const Words& words) { std::cout << Address::parse(words.at(0)).toString(); }

void distance(const Words& words) {
  const size_t size = std::stoul(words.at(0));
  std::vector<Distance> members(size, Distance(size, Env::read().allReduceWay));
  size_t bytes = 0;
  while (std::cin >> bytes) {
    std::vector<uint64_t> said;
    std::vector<bool> isDirect;
    for (Distance& member : members) {
      int64_t trip = 0;
      uint64_t rate = 0;
      std::cin >> trip >> rate;
      isDirect.push_back(member.isFar(bytes));
      if (member.measures()) {
        member.measure({.shortestTrip = std::chrono::microseconds(trip), .bytesPerSecond = rate});
      }
      said.push_back(member.say(isDirect.back()));
    }
    for (size_t place = 0; place < size; ++place) {
      members[place].hear(said[(place + size - 1) % size]);
      std::cout << (isDirect[place] ? "1" : "0");
    }
    std::cout << "\n";
  }
}

void streams(const Words& words) {
  StreamCount count(std::stoul(words.at(0)));
  int64_t milliseconds = 0;
  int64_t queueing = 0;
  std::string state;
  double rate = 0;
  int64_t measured = 0;
  while (std::cin >> milliseconds >> queueing >> state >> rate >> measured) {
    const Clock::time_point now{std::chrono::milliseconds(milliseconds)};
    if (state == "resume") {
      count.resume(std::chrono::microseconds(queueing), now);
      continue;
    }
    count.endResuming(now);
    count.observe({.allFull = true,
                   .queueing = std::chrono::microseconds(queueing),
                   .isLimited = state == "limited",
                   .areHeldByBuffers = state == "held",
                   .bytesPerSecond = rate,
                   .measured = std::chrono::milliseconds(measured)},
                  now);
    std::cout << count.used() << "\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void(const Words&)>> commands{
      {"choose", choose},   {"speed", speed},     {"hmac", hmac},        {"host", host},
      {"address", address}, {"streams", streams}, {"distance", distance}};
  try {
    commands.at(argv[1])(Words(argv + 2, argv + argc));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what();
    return 1;
  }
}
