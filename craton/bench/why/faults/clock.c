/* Preloaded into the processes of a run: gives those of chosen nodes another wall clock, which may change while they
 * run. CLOCK_FILE is a page with one entry for each node. Monotonic clocks stay as they are, as at a step of NTP. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct entry {
    double offset; /* seconds added to the wall clock */
    double rate;   /* further seconds for each second since `since` */
    double since;  /* epoch seconds */
};

static volatile struct entry *own;

static int node_number(void) {
    const char *name = getenv("CRATON_NODE"); /* of ranks and fork servers: node-1 */
    if (name && !strncmp(name, "node-", 5)) return atoi(name + 5);
    char line[4096];
    int file = open("/proc/self/cmdline", O_RDONLY);
    if (file < 0) return -1;
    ssize_t size = read(file, line, sizeof line - 1);
    close(file);
    int is_agent = 0;
    for (char *word = line; size > 0 && word < line + size; word += strlen(word) + 1) {
        line[size] = 0;
        if (!strcmp(word, "craton.agent")) is_agent = 1;
        if (is_agent && !strcmp(word, "--node")) return atoi(word + strlen(word) + 1);
    }
    return -1;
}

__attribute__((constructor)) static void find_own_entry(void) {
    const char *path = getenv("CLOCK_FILE");
    int number = node_number();
    if (!path || number < 0 || number > 63) return;
    int file = open(path, O_RDONLY);
    if (file < 0) return;
    struct entry *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) own = page + number;
}

static double wrong_by(double now) {
    if (!own) return 0;
    return own->offset + (own->rate != 0 ? own->rate * (now - own->since) : 0);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = syscall(SYS_clock_gettime, clock, time);
    if (result || !own || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return result;
    double shift = wrong_by(time->tv_sec + time->tv_nsec * 1e-9);
    long long nanoseconds = time->tv_sec * 1000000000LL + time->tv_nsec + (long long)(shift * 1e9);
    time->tv_sec = nanoseconds / 1000000000LL;
    time->tv_nsec = nanoseconds % 1000000000LL;
    return 0;
}

int gettimeofday(struct timeval *restrict value, void *restrict zone) {
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    value->tv_sec = now.tv_sec;
    value->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}
