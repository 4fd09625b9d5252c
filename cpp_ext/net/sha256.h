// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the hello alone: a few hundred bytes per connection.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace baguarun::net {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::span<const uint8_t> message);

Digest hmacSha256(std::span<const uint8_t> key, std::span<const uint8_t> message);

// Compares in a time that does not depend on where the two differ.
bool equalInConstantTime(std::span<const uint8_t> left, std::span<const uint8_t> right);

}  // namespace baguarun::net
