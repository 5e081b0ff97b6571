#include "parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
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
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_gomp() {
    static const GompParallel found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

// For processes without libgomp. Threads sleep between calls.
class Pool {
  public:
    void run(Work& work, int helpers) {
        std::lock_guard<std::mutex> one_caller(callers_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            helpers = start(helpers);
            work_ = &work;
            wanted_ = helpers;
            busy_ = helpers;
            ++generation_;
        }
        wake_.notify_all();
        work.run();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
        work_ = nullptr;
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

  private:
    // Have so many threads, or as many as the system gives; returns how many of them there are. Any number is right,
    // none included: the caller does what nobody else does.
    int start(int wanted) {
        try {
            while (static_cast<int>(threads_.size()) < wanted) {
                const int index = static_cast<int>(threads_.size());
                threads_.emplace_back([this, index] { loop(index); });
            }
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
        return std::min(wanted, static_cast<int>(threads_.size()));
    }

    void loop(int index) {
        uint64_t seen = 0;
        for (;;) {
            Work* work;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return stop_ || (generation_ != seen && index < wanted_); });
                if (stop_) return;
                seen = generation_;
                work = work_;
            }
            work->run();
            std::lock_guard<std::mutex> lock(mutex_);
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex callers_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> threads_;
    Work* work_ = nullptr;
    int wanted_ = 0, busy_ = 0;
    uint64_t generation_ = 0;
    bool stop_ = false;
};

}  // namespace

void parallel_for(int threads, int64_t units, void (*call)(void*, int64_t), void* context) {
    threads = static_cast<int>(std::min<int64_t>(threads, units));
    Work work{call, context, units};
    if (threads <= 1) {
        work.run();
    } else if (const GompParallel gomp = find_gomp()) {
        gomp(run_work, &work, static_cast<unsigned>(threads), 0);
    } else {
        static Pool pool;
        pool.run(work, threads - 1);
    }
    work.rethrow();
}

}  // namespace questkv
