// Package work makes histories: some clients do operations at random on a log of their own.
package work

import (
	"context"
	"fmt"
	"math/rand"
	"slices"
	"sync"
	"time"

	"dlog/blackbox/client"
	"dlog/blackbox/history"
)

const (
	clientsMin, clientsMax       = 3, 5
	operationsMin, operationsMax = 4, 7 // of each client
	lastReads                    = 20   // tries before the history is given up
	producer                     = "p"
)

// shape is how often operations of a kind come in a history.
type shape struct {
	append, conditional, produce, begin, read, tail, count, follow, seal, release int
}

var shapes = []shape{
	{append: 35, conditional: 10, produce: 15, begin: 4, read: 15, tail: 9, count: 5, follow: 5, release: 2},
	{append: 10, conditional: 45, produce: 5, begin: 2, read: 12, tail: 20, count: 4, follow: 2, release: 2},
	{append: 5, conditional: 5, produce: 50, begin: 15, read: 12, tail: 6, count: 3, follow: 2, release: 6},
	{append: 30, conditional: 15, produce: 15, begin: 5, read: 12, tail: 8, count: 4, follow: 3, seal: 4, release: 2},
}

// board is what the clients of a history know together: positions to read from and to expect.
type board struct {
	lock      sync.Mutex
	positions []history.Position
}

func (known *board) note(text string) {
	position, err := history.ParsePosition(text)
	if err != nil {
		return
	}
	known.lock.Lock()
	defer known.lock.Unlock()
	if at, isThere := slices.BinarySearchFunc(known.positions, position, history.Position.Compare); !isThere {
		known.positions = slices.Insert(known.positions, at, position)
	}
}

// some returns a position that any client learned, or "" if there is none.
func (known *board) some(random *rand.Rand) string {
	known.lock.Lock()
	defer known.lock.Unlock()
	if len(known.positions) == 0 {
		return ""
	}
	return known.positions[random.Intn(len(known.positions))].String()
}

// last returns the highest position that any client learned, or "".
func (known *board) last() string {
	known.lock.Lock()
	defer known.lock.Unlock()
	if len(known.positions) == 0 {
		return ""
	}
	return known.positions[len(known.positions)-1].String()
}

// Make makes a history of the log `name`; an error if the log cannot be made or read in the end.
func Make(pool *client.Pool, name string, seed int64) (*history.History, error) {
	random := rand.New(rand.NewSource(seed))
	began := time.Now()
	clock := func() int64 { return int64(time.Since(began)) }
	found := &history.History{Name: name, Language: "go", Seed: seed}
	first := client.New(pool, name, 0, rand.New(rand.NewSource(random.Int63())), clock)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := first.Create(ctx); err != nil {
		return nil, fmt.Errorf("log %s cannot be made: %w", name, err)
	}
	weights := shapes[random.Intn(len(shapes))]
	known := &board{}
	workers := make([]*worker, clientsMin+random.Intn(clientsMax-clientsMin+1))
	var running sync.WaitGroup
	for number := range workers {
		chance := rand.New(rand.NewSource(random.Int63()))
		workers[number] = &worker{
			client:  client.New(pool, name, number+1, chance, clock),
			number:  number + 1,
			random:  chance,
			weights: weights,
			known:   known,
		}
		running.Add(1)
		go func() {
			defer running.Done()
			workers[number].run()
		}()
	}
	running.Wait()
	for _, each := range workers {
		found.Operations = append(found.Operations, each.client.Close()...)
	}
	for range lastReads {
		if last := first.Read("", ""); last.Outcome == history.Done {
			found.Operations = append(found.Operations, last)
			first.Release(ctx)
			return found, nil
		}
	}
	return found, fmt.Errorf("log %s cannot be read: %s", name, first.Close()[0].Error)
}

// worker is one client and what it does.
type worker struct {
	client   *client.Client
	number   int
	random   *rand.Rand
	weights  shape
	known    *board
	values   int
	claim    *history.Claim
	sequence int64 // of its next record
}

func (worker *worker) run() {
	for range operationsMin + worker.random.Intn(operationsMax-operationsMin+1) {
		worker.doSomething()
		if worker.random.Intn(3) == 0 {
			time.Sleep(time.Duration(worker.random.Intn(20)) * time.Millisecond)
		}
	}
}

func (worker *worker) doSomething() {
	weights := worker.weights
	choices := []struct {
		weight int
		do     func()
	}{
		{weights.append, worker.append},
		{weights.conditional, worker.appendIf},
		{weights.produce, worker.produce},
		{weights.begin, worker.begin},
		{weights.read, worker.read},
		{weights.tail, worker.tail},
		{weights.count, func() { worker.client.Count() }},
		{weights.follow, worker.follow},
		{weights.seal, func() { worker.client.Seal() }},
		{weights.release, func() { worker.client.Release(context.Background()) }},
	}
	sum := 0
	for _, each := range choices {
		sum += each.weight
	}
	drawn := worker.random.Intn(sum)
	for _, each := range choices {
		if drawn -= each.weight; drawn < 0 {
			each.do()
			return
		}
	}
}

// some returns values that are in no other append of the history.
func (worker *worker) some(count int) []string {
	values := make([]string, count)
	for at := range values {
		worker.values++
		values[at] = fmt.Sprintf("%d.%d", worker.number, worker.values)
	}
	return values
}

func (worker *worker) append() {
	done := worker.client.Append(history.Operation{Values: worker.some(1)})
	worker.known.note(done.Last)
}

// appendIf expects the last record where a client saw it, or, less often, where it was before.
func (worker *worker) appendIf() {
	asked := history.Operation{Conditional: true, Values: worker.some(1 + worker.random.Intn(3))}
	switch drawn := worker.random.Intn(10); {
	case drawn < 8:
		asked.Expected = worker.known.last()
	case drawn < 9:
		asked.Expected = worker.known.some(worker.random)
	}
	if worker.claim != nil && worker.random.Intn(3) == 0 {
		worker.settle(asked)
		return
	}
	worker.known.note(worker.client.Append(asked).Last)
}

// produce appends as the incarnation that this client began last, whoever has begun one since.
func (worker *worker) produce() {
	if worker.claim == nil {
		worker.begin()
	}
	if worker.claim != nil {
		worker.settle(history.Operation{Values: worker.some(1)})
	}
}

func (worker *worker) settle(asked history.Operation) {
	asked.Claim, asked.Sequence = worker.claim, worker.sequence
	done := worker.client.Append(asked)
	worker.known.note(done.Last)
	switch {
	case done.Outcome == history.Done:
		worker.sequence += int64(len(done.Values))
	case done.Outcome == history.Unknown:
		worker.claim = nil // its next number is not known
	case done.Error == history.Fenced && worker.random.Intn(2) == 0:
		worker.claim = nil // else it tries again, as one that does not listen
	}
}

func (worker *worker) begin() {
	begun := worker.client.Begin(producer)
	if begun.Outcome == history.Done {
		worker.claim, worker.sequence = begun.Claim, begun.Sequence+1
	}
}

func (worker *worker) read() {
	var done history.Operation
	switch worker.random.Intn(4) {
	case 0:
		done = worker.client.Read("", "")
	case 1:
		done = worker.client.ReadParts()
	case 2:
		done = worker.client.Read(worker.known.some(worker.random), "")
	case 3:
		done = worker.client.Read("", worker.known.some(worker.random))
	}
	for _, row := range done.Rows {
		worker.known.note(row.Position)
	}
}

func (worker *worker) tail() {
	worker.known.note(worker.client.Tail().Last)
}

func (worker *worker) follow() {
	done := worker.client.Follow(worker.known.some(worker.random), 1+worker.random.Intn(2))
	for _, row := range done.Rows {
		worker.known.note(row.Position)
	}
}
