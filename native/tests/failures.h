// What a thread throws reaches the caller, and nothing is lost by it: the same threads compute what they always did.
#pragma once

#include <atomic>
#include <new>
#include <stdexcept>
#include <thread>

#include "attention.h"
#include "parallel.h"
#include "questkv/threads.h"

namespace questkv::tests {

struct Throwing {
    std::thread::id caller = std::this_thread::get_id();
    bool in_worker;
    std::atomic<bool> thrown{false};
    std::atomic<int> running{0};

    // A unit of the side that doesn't throw lasts until the other side has thrown, so both have one.
    void run() {
        ++running;
        struct Leave {
            std::atomic<int>& of;
            ~Leave() { --of; }
        } const leave{running};
        if ((std::this_thread::get_id() != caller) == in_worker) {
            thrown = true;
            throw std::bad_alloc();
        }
        while (!thrown) std::this_thread::yield();
    }
};

inline void test_thrown_exceptions() {
    for (const int threads : {2, 3})
        for (const bool in_worker : {true, false})
            for (int again = 0; again < 50; ++again) {
                tally().where = "exceptions on " + std::to_string(threads) + " threads";
                take_own_threads(again % 2 == 0);
                Throwing work{.in_worker = in_worker};
                bool caught = false;
                try {
                    parallel_for(threads, 1000, [](void* w, int64_t) { static_cast<Throwing*>(w)->run(); }, &work);
                } catch (const std::bad_alloc&) {
                    caught = true;
                }
                CHECK(caught);
                CHECK(work.running == 0);
                std::atomic<int64_t> sum{0};
                const auto add = [](void* of, int64_t unit) { *static_cast<std::atomic<int64_t>*>(of) += unit; };
                parallel_for(threads, 1000, add, &sum);
                CHECK(sum == 499500);
            }
    take_own_threads(false);
}

// Two callers at once: neither waits for the other's units.
inline void test_callers() {
    for (const bool own : {true, false}) {
        tally().where = std::string("two callers, ") + (own ? "own threads" : "libgomp's");
        std::atomic<bool> other_is_done{false};
        std::atomic<int64_t> units{0};
        std::thread other([&] {
            take_own_threads(own);
            while (units == 0) std::this_thread::yield();
            std::atomic<int64_t> sum{0};
            const auto add = [](void* of, int64_t unit) { *static_cast<std::atomic<int64_t>*>(of) += unit; };
            parallel_for(3, 100, add, &sum);
            CHECK(sum == 4950);
            other_is_done = true;
        });
        const auto wait = [&](int64_t) {
            ++units;
            while (!other_is_done) std::this_thread::yield();
        };
        const auto call = [](void* f, int64_t unit) { (*static_cast<decltype(wait)*>(f))(unit); };
        take_own_threads(own);
        parallel_for(2, 10, call, const_cast<void*>(static_cast<const void*>(&wait)));
        take_own_threads(false);
        other.join();
        CHECK(units == 10);
    }
}

// Rows so long that no machine has the scratch memory for their scores, among rows that are none.
inline void test_out_of_memory(const KernelTable& kernels) {
    const Shape shape{2, 2, 64, 16, DType::f32, true, {200, 33, 40, 64, 65, 100, 70, 90}};
    const Problem problem(shape, 7);
    Layer layer(shape, problem.segment_pages);
    write_tokens(problem, layer);
    kernels.seal(layer.pages(), static_cast<int64_t>(problem.sealed_ids.size()), problem.sealed_ids.data(), nullptr, 1);
    const Softmax softmax{problem.scale, 0, nullptr};
    const std::vector<int64_t> wanted(shape.lengths.size(), 2);
    std::vector<int64_t> too_long = shape.lengths;
    too_long[5] = too_long[2] = int64_t{1} << 50;
    Rows rows = problem.rows(wanted.data());
    rows.lengths = too_long.data();
    for (const Group group : {Group::mean, Group::softmax_mean, Group::per_head}) {
        const Scoring scoring{0.5f, group, 0, 1};
        const Decoded expected = decode(kernels, problem, layer, problem.rows(wanted.data()), softmax, scoring, 1);
        for (const int threads : {1, 2, 3, -2, -3}) {
            tally().where = std::string(kernels.name) + " out of memory on " + std::to_string(threads) + " threads";
            take_own_threads(threads < 0);
            bool caught = false;
            try {
                decode(kernels, problem, layer, rows, softmax, scoring, std::abs(threads));
            } catch (const std::bad_alloc&) {
                caught = true;
            }
            CHECK(caught);
            const Decoded after =
                decode(kernels, problem, layer, problem.rows(wanted.data()), softmax, scoring, std::abs(threads));
            CHECK(same_bits(after.out, expected.out));
            CHECK(after.pages_read == expected.pages_read);
            take_own_threads(false);
        }
    }
}

inline void test_failures() {
    test_thrown_exceptions();
    test_callers();
    for (const KernelTable* const* table = available_kernels(); *table; ++table) test_out_of_memory(**table);
}

}  // namespace questkv::tests
