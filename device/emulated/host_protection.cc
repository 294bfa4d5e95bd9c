#include "pinion/device/emulated/host_protection.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>

#include "absl/status/status.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

constexpr uint64_t kPageBytes = 4 * kKiB;

uintptr_t AddressOf(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// --- Data of the SIGSEGV handler ---
// The handler may neither lock nor allocate, so copies in flight publish notes in a process-wide
// table. While it is full, faults come without a message.

struct Note {
  std::atomic<bool> taken;
  std::atomic<uintptr_t> begin;
  std::atomic<uintptr_t> end;  // set last: nonzero makes the other fields valid
  char what[96];
};

constexpr int kNotes = 512;
constinit std::array<Note, kNotes> notes = {};
struct sigaction previous_action;

int LeaveNote(uintptr_t begin, uintptr_t end, const std::string& what) {
  for (int i = 0; i < kNotes; ++i) {
    Note& note = notes[i];
    if (note.taken.exchange(true)) continue;
    note.what[what.copy(note.what, sizeof(note.what) - 1)] = '\0';
    note.begin = begin;
    note.end = end;
    return i;
  }
  return -1;
}

void TakeBackNote(int i) {
  if (i < 0) return;
  notes[i].end = 0;
  notes[i].taken = false;
}

void Print(const char* text) {
  // A failure cannot be handled here.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
}

void PrintAddress(uintptr_t address) {
  char text[2 * sizeof(address) + 1] = {};
  for (int i = 2 * sizeof(address) - 1; i >= 0; --i, address >>= 4) {
    text[i] = "0123456789abcdef"[address & 15];
  }
  Print("0x");
  Print(text);
}

void OnFault(int signal, siginfo_t* info, void* /*context*/) {
  const uintptr_t address = AddressOf(info->si_addr);
  const auto note = std::find_if(notes.begin(), notes.end(), [address](const Note& copy) {
    return address < copy.end && address >= copy.begin;
  });
  if (info->si_code == SEGV_ACCERR && note != notes.end()) {
    Print("pinion: host access to ");
    PrintAddress(address);
    Print(" inside ");
    Print(note->what);
    Print(", which the host has not waited for (EmulatedOptions::protect_host_pages)\n");
  }
  sigaction(SIGSEGV, &previous_action, nullptr);
  // A fault repeats when the handler returns; a sent signal has to be raised again.
  if (info->si_code <= 0) raise(signal);
}

void InstallHandler() {
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  PINION_CHECK(sigaction(SIGSEGV, &action, &previous_action) == 0) << std::strerror(errno);
}

}  // namespace

absl::StatusOr<TwoViews> MapTwice(uint64_t size_bytes) {
  const auto failed = [size_bytes](const char* call) {
    return absl::ResourceExhaustedError(
        "the host has no " + HumanBytes(size_bytes) +
        " for emulated pinned memory that is mapped twice: " + call + ": " + std::strerror(errno));
  };
  const int file = memfd_create("pinion emulated pinned memory", MFD_CLOEXEC);
  if (file < 0) return failed("memfd_create");
  const auto map = [size_bytes, file] {
    return mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  };
  TwoViews views = {MAP_FAILED, MAP_FAILED};
  if (ftruncate(file, static_cast<off_t>(size_bytes)) == 0) {
    views.program = map();
    if (views.program != MAP_FAILED) views.machine = map();
  }
  if (views.machine != MAP_FAILED) {
    close(file);  // the mappings keep the memory
    return views;
  }
  const absl::Status status = failed(views.program == MAP_FAILED ? "the first view" : "the second");
  if (views.program != MAP_FAILED) munmap(views.program, size_bytes);
  close(file);
  return status;
}

HostProtection::HostProtection() {
  static std::once_flag installed;
  std::call_once(installed, InstallHandler);
}

HostProtection::~HostProtection() {
  while (!segments_.empty()) {
    const auto& [program, segment] = *segments_.begin();
    const uint64_t size_bytes = segment.size_bytes;
    munmap(RemoveSegment(reinterpret_cast<const void*>(program)), size_bytes);
  }
}

void HostProtection::AddSegment(const TwoViews& views, uint64_t size_bytes) {
  segments_[AddressOf(views.program)] = {static_cast<char*>(views.machine), size_bytes,
                                         std::vector<PageUse>(size_bytes / kPageBytes)};
}

void* HostProtection::RemoveSegment(const void* program) {
  const auto it = segments_.find(AddressOf(program));
  PINION_CHECK(it != segments_.end());
  const uintptr_t begin = it->first;
  const uintptr_t end = begin + it->second.size_bytes;
  std::erase_if(closed_, [this, begin, end](const Closed& closed) {
    const bool mine = closed.begin >= begin && closed.begin < end;
    if (mine) Open(closed);
    return mine;
  });
  void* const machine = it->second.machine;
  segments_.erase(it);
  return machine;
}

CopyPiece HostProtection::Close(const CopyPiece& piece, Moment copy, const std::string& what) {
  return {CloseEnd(piece.dst, piece.size_bytes, /*written=*/true, copy, what),
          CloseEnd(const_cast<void*>(piece.src), piece.size_bytes, /*written=*/false, copy, what),
          piece.size_bytes};
}

void HostProtection::OpenSeen(const VectorClock& host) {
  std::erase_if(closed_, [this, &host](const Closed& closed) {
    const bool seen = host.Get(closed.copy.context) >= closed.copy.epoch;
    if (seen) Open(closed);
    return seen;
  });
}

void* HostProtection::CloseEnd(void* data, uint64_t size_bytes, bool written, Moment copy,
                               const std::string& what) {
  const uintptr_t begin = AddressOf(data);
  const auto it = segments_.upper_bound(begin);
  if (it == segments_.begin()) return data;
  const auto& [program, segment] = *std::prev(it);
  if (begin + size_bytes > program + segment.size_bytes) return data;
  Closed closed;
  closed.begin = AlignUp(begin, kPageBytes);
  closed.end = (begin + size_bytes) / kPageBytes * kPageBytes;
  if (closed.begin < closed.end) {
    closed.written = written;
    closed.copy = copy;
    closed.note = LeaveNote(closed.begin, closed.end, what);
    Use(closed, +1);
    closed_.push_back(closed);
  }
  return segment.machine + (begin - program);
}

void HostProtection::Open(const Closed& closed) {
  TakeBackNote(closed.note);
  Use(closed, -1);
}

int HostProtection::AllowedAccess(const PageUse& use) {
  if (use.writers > 0) return PROT_NONE;
  return use.readers > 0 ? PROT_READ : PROT_READ | PROT_WRITE;
}

void HostProtection::Use(const Closed& closed, int copies) {
  auto& [program, segment] = *std::prev(segments_.upper_bound(closed.begin));
  const size_t end = (closed.end - program) / kPageBytes;
  for (size_t page = (closed.begin - program) / kPageBytes; page < end;) {
    const size_t first = page;
    int allowed = 0;
    // Change as many pages as possible per mprotect call.
    for (; page < end; ++page) {
      PageUse use = segment.pages[page];
      (closed.written ? use.writers : use.readers) += copies;
      if (page == first) allowed = AllowedAccess(use);
      if (AllowedAccess(use) != allowed) break;
      segment.pages[page] = use;
    }
    void* const data = reinterpret_cast<void*>(program + first * kPageBytes);
    PINION_CHECK(mprotect(data, (page - first) * kPageBytes, allowed) == 0)
        << "mprotect: " << std::strerror(errno)
        << " (protect_host_pages needs pages of 4 KiB, and many mappings: vm.max_map_count)";
  }
}

}  // namespace pinion
