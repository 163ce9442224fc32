// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/secrets.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <limits>

#include "core/error.hpp"

namespace m2n {

static_assert(kMaxHashBytes >= EVP_MAX_MD_SIZE);

std::string keyed_hash(std::string_view key, std::string_view text) {
  unsigned char hash[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  if (key.size() > static_cast<std::size_t>(std::numeric_limits<int>::max()) ||
      ::HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(), hash,
             &size) == nullptr) {
    throw Error(Errc::bad_argument, "cannot hash with the job's token: the library refuses it");
  }
  return {reinterpret_cast<const char*>(hash), size};
}

std::string make_nonce() {
  unsigned char bytes[kNonceBytes];
  if (::RAND_bytes(bytes, sizeof bytes) != 1) {
    throw Error(Errc::unavailable, "this machine has no random numbers for a handshake");
  }
  return {reinterpret_cast<const char*>(bytes), sizeof bytes};
}

bool equal_secrets(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace m2n
