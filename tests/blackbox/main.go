// Command blackbox makes histories of a cluster, checks them, and spoils them to check the checker.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dlog/blackbox/checker"
	"dlog/blackbox/client"
	"dlog/blackbox/history"
	"dlog/blackbox/spoiler"
	"dlog/blackbox/work"
)

const checkTimeout = 60 * time.Second

func main() {
	commands := map[string]func([]string) error{"run": run, "check": check, "spoil": spoil}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: blackbox run|check|spoil [options]; -h after one of them lists its options")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// run makes histories and writes them to a file, a line each.
func run(arguments []string) error {
	flags := flag.NewFlagSet("run", flag.ExitOnError)
	endpoints := flags.String("endpoints", "", "of proxies: grpc://host:port, with commas between")
	count := flags.Int("histories", 50, "how many")
	atOnce := flags.Int("at-once", 24, "how many at a time")
	seed := flags.Int64("seed", 1, "of the first history")
	prefix := flags.String("prefix", "blackbox/go", "of the names of their logs")
	out := flags.String("out", "histories.jsonl", "the file")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	go endWithParent()
	file, err := os.Create(*out)
	if err != nil {
		return err
	}
	defer file.Close()
	var (
		pool    = client.NewPool(strings.Split(*endpoints, ","))
		writing sync.Mutex
		running sync.WaitGroup
		failed  []error
		numbers = make(chan int)
	)
	one := func(number int) error {
		name := fmt.Sprintf("%s-%d", *prefix, number)
		made, err := work.Make(pool, name, *seed+int64(number))
		if err != nil {
			return err
		}
		line, err := json.Marshal(made)
		if err != nil {
			return err
		}
		writing.Lock()
		defer writing.Unlock()
		_, err = file.Write(append(line, '\n'))
		return err
	}
	for range *atOnce {
		running.Add(1)
		go func() {
			defer running.Done()
			for number := range numbers {
				if err := one(number); err != nil {
					writing.Lock()
					failed = append(failed, err)
					writing.Unlock()
				}
			}
		}()
	}
	for number := range *count {
		numbers <- number
	}
	close(numbers)
	running.Wait()
	if len(failed) > 0 {
		return fmt.Errorf("%d histories could not be made; the first: %w", len(failed), failed[0])
	}
	return file.Close()
}

// endWithParent ends the program when whoever started it is gone.
func endWithParent() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	fmt.Fprintln(os.Stderr, "error: standard input has ended")
	os.Exit(1)
}

// check checks the histories of files; it returns an error if one is rejected.
func check(arguments []string) error {
	flags := flag.NewFlagSet("check", flag.ExitOnError)
	artifacts := flags.String("artifacts", "artifacts", "the folder for histories that are rejected")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	counts := map[string]int{}
	total, rejected := 0, 0
	judge := func(found *history.History) error {
		total++
		for _, each := range found.Operations {
			counts[summary(each)]++
		}
		verdict := checker.Check(found, checkTimeout)
		if verdict.Why == "" {
			return nil
		}
		rejected++
		fmt.Printf("rejected: %s (seed %d): %s\n", found.Name, found.Seed, verdict.Why)
		return keep(*artifacts, found, verdict)
	}
	if err := each(flags.Args(), judge); err != nil {
		return err
	}
	for _, each := range sortedKeys(counts) {
		fmt.Printf("%8d  %s\n", counts[each], each)
	}
	fmt.Printf("%d histories, %d rejected\n", total, rejected)
	if rejected > 0 {
		return fmt.Errorf("rejected histories are in %s", *artifacts)
	}
	return nil
}

// spoil makes wrong histories of right ones, in every way, and returns an error if one is accepted.
func spoil(arguments []string) error {
	flags := flag.NewFlagSet("spoil", flag.ExitOnError)
	seed := flags.Int64("seed", 1, "of the choice of what is spoiled")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	random := rand.New(rand.NewSource(*seed))
	made, accepted := make([]int, len(spoiler.Ways)), 0
	judge := func(right *history.History) error {
		for at, way := range spoiler.Ways {
			wrong := way.Spoil(right, random)
			if wrong == nil {
				continue
			}
			made[at]++
			if checker.Check(wrong, checkTimeout).Why == "" {
				accepted++
				fmt.Printf("accepted: %s (seed %d)\n", wrong.Name, wrong.Seed)
			}
		}
		return nil
	}
	if err := each(flags.Args(), judge); err != nil {
		return err
	}
	total := 0
	for at, way := range spoiler.Ways {
		fmt.Printf("%8d  %s\n", made[at], way.Name)
		total += made[at]
	}
	fmt.Printf("%d wrong histories, %d accepted\n", total, accepted)
	if accepted > 0 {
		return fmt.Errorf("the checker accepts what is wrong")
	}
	return nil
}

// each calls for each history of some files.
func each(paths []string, call func(*history.History) error) error {
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		err = history.Each(file, call)
		file.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// summary says of what kind an operation is, and how it ended.
func summary(operation history.Operation) string {
	kind := operation.Kind
	if operation.Conditional {
		kind = "conditional " + kind
	}
	if kind != history.Begin && operation.Claim != nil {
		kind += " of a producer"
	}
	if operation.Outcome == history.Refused {
		return fmt.Sprintf("%s: %s, %s", kind, operation.Outcome, operation.Error)
	}
	return fmt.Sprintf("%s: %s", kind, operation.Outcome)
}

// keep writes down a rejected history, and a page that shows it.
func keep(folder string, found *history.History, verdict checker.Verdict) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	path := filepath.Join(folder, strings.ReplaceAll(found.Name, "/", "-"))
	line, err := json.Marshal(found)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".jsonl", append(line, '\n'), 0o644); err != nil {
		return err
	}
	return verdict.Visualize(path + ".html")
}

func sortedKeys(counts map[string]int) []string {
	keys := []string{}
	for key := range counts {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
