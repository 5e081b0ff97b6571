#include "parallel.h"

#include <dlfcn.h>

#include "questkv/threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace questkv {
namespace {

struct Work {
    void (*call)(void*, int64_t);
    void* context;
    int64_t units;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};  // the first one; the caller of the threads reads it when all have come back

    // An exception that left a thread would end the process: it is carried to the caller, and the other units are left.
    void run() noexcept {
        try {
            for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) call(context, unit);
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
            next.store(units, std::memory_order_relaxed);
        }
    }

    void rethrow() const {
        if (error) std::rethrow_exception(error);
    }
};

void run_work(void* work) { static_cast<Work*>(work)->run(); }

// torch computes on libgomp's threads and they spin for a while after each of its operators. A second pool would fight
// with them for the cores, so ours is the same one, found in the process at run time (its entry point is a stable ABI).
// Where torch has no threads at work, ours are better: libgomp's barrier waits for every thread, also for one that
// found nothing left to do and whose core another program has.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_gomp() {
    static const GompParallel found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

thread_local bool own_threads = false;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Watch for something for a while, longer than what lies between two operators of a decode step, and no longer once the
// thread has lost its core meanwhile: then others need the cores, and whoever sleeps leaves them one.
template <class Condition>
bool seen_soon(const Condition& holds) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::microseconds kPatience{200}, kLost{40};
    Clock::time_point start = Clock::now(), before = start;
    for (;;) {
        for (int i = 0; i < 32; ++i) {
            if (holds()) return true;
            relax();
        }
        const Clock::time_point now = Clock::now();
        if (now - before > kLost || now - start > kPatience) return holds();
        before = now;
    }
}

// For processes without libgomp, and where it has nothing else to do. Nobody waits for a thread that isn't there: the
// caller takes units until none is left, and then waits for those alone that others have begun. Threads watch for work
// for a while and then sleep.
class Pool {
  public:
    void run(Work& work, int helpers) {
        const std::unique_lock<std::mutex> one_caller(callers_, std::try_to_lock);
        if (!one_caller) return work.run();  // the threads work for somebody else
        helpers = start(helpers);
        work_ = &work;
        const uint64_t generation = (state_.load() & ~kCounts) + kGeneration;
        state_.store(generation | static_cast<uint64_t>(helpers) * kPlace);
        if (sleeping_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            for (int i = 0; i < helpers; ++i) wake_.notify_one();
        }
        work.run();
        state_.fetch_and(~kPlaces);  // nobody joins any more
        const auto alone = [&] { return (state_.load() & kInside) == 0; };
        if (seen_soon(alone)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.store(true);
        done_.wait(lock, alone);
        waiting_.store(false);
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_.store(true);
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

  private:
    // One number: how many threads are inside, how many more may join, and a generation that tells two calls apart.
    static constexpr uint64_t kInside = 0xffff, kPlace = 0x10000, kPlaces = 0xffff0000, kCounts = kInside | kPlaces;
    static constexpr uint64_t kGeneration = uint64_t{1} << 32;

    // Have so many threads, or as many as the system gives; returns how many of them there are. Any number is right,
    // none included: the caller does what nobody else does.
    int start(int wanted) {
        wanted = std::min(wanted, 0xffff);
        try {
            while (static_cast<int>(threads_.size()) < wanted) threads_.emplace_back([this] { loop(); });
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
        return std::min(wanted, static_cast<int>(threads_.size()));
    }

    bool open() const { return (state_.load() & kPlaces) != 0 || stop_.load(); }

    bool join() {
        uint64_t state = state_.load();
        while (state & kPlaces)
            if (state_.compare_exchange_weak(state, state - kPlace + 1)) return true;
        return false;
    }

    void loop() {
        const auto something = [this] { return open(); };
        for (;;) {
            if (!seen_soon(something)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, something);
                sleeping_.fetch_sub(1);
            }
            if (stop_.load()) return;
            if (!join()) continue;
            work_->run();
            // The last one out looks whether the caller sleeps, after it has left; the caller the other way round.
            if ((state_.fetch_sub(1) & kInside) == 1 && waiting_.load()) {
                std::lock_guard<std::mutex> lock(mutex_);
                done_.notify_one();
            }
        }
    }

    std::mutex callers_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> threads_;
    Work* work_ = nullptr;
    std::atomic<uint64_t> state_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> waiting_{false}, stop_{false};
};

}  // namespace

void take_own_threads(bool own) { own_threads = own; }

void parallel_for(int threads, int64_t units, void (*call)(void*, int64_t), void* context) {
    threads = static_cast<int>(std::min<int64_t>(threads, units));
    Work work{call, context, units};
    if (threads <= 1) {
        work.run();
    } else if (const GompParallel gomp = own_threads ? nullptr : find_gomp()) {
        gomp(run_work, &work, static_cast<unsigned>(threads), 0);
    } else {
        static Pool pool;
        pool.run(work, threads - 1);
    }
    work.rethrow();
}

}  // namespace questkv
