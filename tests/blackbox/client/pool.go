// Package client speaks to proxies by Arrow Flight, as docs/proxy.md and the pages that it lists say.
package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"sync"
	"time"

	"dlog/blackbox/history"

	"github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	answerTimeout = 3 * time.Second // of a proxy that lives; one that is frozen gives none
	avoidFor      = 2 * time.Second
	pauseMin      = 10 * time.Millisecond
	pauseMax      = 500 * time.Millisecond
)

// Pool holds a connection to each proxy, and which of them gave no answer of late.
type Pool struct {
	locations []string

	lock    sync.Mutex
	clients map[string]flight.Client
	avoided map[string]time.Time
}

// NewPool returns a pool for proxies at these locations, such as grpc://host:port.
func NewPool(locations []string) *Pool {
	return &Pool{
		locations: locations,
		clients:   map[string]flight.Client{},
		avoided:   map[string]time.Time{},
	}
}

func (pool *Pool) connect(location string) (flight.Client, error) {
	pool.lock.Lock()
	defer pool.lock.Unlock()
	if found, ok := pool.clients[location]; ok {
		return found, nil
	}
	made, err := flight.NewClientWithMiddleware(strings.TrimPrefix(location, "grpc://"), nil, nil,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: answerTimeout}))
	if err == nil {
		pool.clients[location] = made
	}
	return made, err
}

// pick returns the location of some proxy, of one that answers if any is thought to.
func (pool *Pool) pick(random *rand.Rand) string {
	silent := pool.silent()
	var choices []string
	for _, each := range pool.locations {
		if !slices.Contains(silent, each) {
			choices = append(choices, each)
		}
	}
	if len(choices) == 0 {
		choices = pool.locations
	}
	return choices[random.Intn(len(choices))]
}

// avoid notes that a proxy gave no answer.
func (pool *Pool) avoid(location string) {
	pool.lock.Lock()
	defer pool.lock.Unlock()
	pool.avoided[location] = time.Now().Add(avoidFor)
}

// silent returns the locations of those that gave no answer of late.
func (pool *Pool) silent() []string {
	pool.lock.Lock()
	defer pool.lock.Unlock()
	found := []string{}
	for location, until := range pool.avoided {
		if time.Now().Before(until) {
			found = append(found, location)
		}
	}
	return found
}

// refusal is why a call had no answer: the name of the proxy's error, or of gRPC's status.
type refusal struct {
	name     string
	location string // where another proxy serves the log, if it was reported
	last     string // position of the log's last record, if it was reported; "none": it has none
	at       string // which proxy, if that is not the one that was asked now
	err      error
	code     codes.Code
}

func (refused *refusal) Error() string { return refused.err.Error() }

func refusalOf(err error, trailer metadata.MD) *refusal {
	var known *refusal
	if errors.As(err, &known) {
		return known
	}
	if err == nil {
		return nil
	}
	answered := status.Convert(err)
	if wrapped := interface{ GRPCStatus() *status.Status }(nil); errors.As(err, &wrapped) {
		answered = wrapped.GRPCStatus() // without what others wrote around its message
	}
	name, _, isNamed := strings.Cut(answered.Message(), ":")
	if !isNamed || !strings.HasSuffix(name, "Error") {
		name = answered.Code().String()
	}
	first := func(key string) string {
		if found := trailer.Get(key); len(found) > 0 {
			return found[0]
		}
		return ""
	}
	return &refusal{name: name, location: first("dlog-location"), last: first("dlog-last-dlsn"),
		err: err, code: answered.Code()}
}

// isPassing returns whether the same call may succeed later, or elsewhere.
func (refused *refusal) isPassing() bool {
	switch refused.code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted:
		return true
	}
	return refused.name == "Internal error from Core"
}

// mayHaveEffect returns whether what was refused may have been done all the same: not if the owner of
// the log decided about it, nor if it learned where the owner is, nor if no proxy was reached.
func (refused *refusal) mayHaveEffect() bool {
	switch refused.name {
	case history.ConditionFailed, history.Fenced, history.Gap, history.Sealed:
		return false
	}
	return refused.location == "" && !strings.Contains(refused.Error(), "connect: connection refused")
}

// route says where to call next.
type route struct {
	pool   *Pool
	random *rand.Rand
	pause  time.Duration
	next   string
}

// attempts calls `try` with one proxy after another until it succeeds, is refused for good, or the
// context ends.
func (pool *Pool) attempts(
	ctx context.Context, random *rand.Rand, try func(location string) error,
) error {
	way := route{pool: pool, random: random, pause: pauseMin}
	for {
		location := way.next
		if location == "" {
			location = pool.pick(random)
		}
		err := try(location)
		if err == nil {
			return nil
		}
		refused := refusalOf(err, nil)
		if !refused.isPassing() {
			return refused
		}
		if !way.turn(ctx, location, refused) {
			return refused
		}
	}
}

// turn chooses the next proxy, and waits a little; it returns false if the time is over.
func (way *route) turn(ctx context.Context, location string, refused *refusal) bool {
	way.next = refused.location
	if refused.at != "" {
		location = refused.at
	}
	if refused.code == codes.DeadlineExceeded || refused.code == codes.Unavailable &&
		refused.name == codes.Unavailable.String() {
		way.pool.avoid(location) // the proxy itself said nothing
	}
	if refused.location != "" && slices.Contains(way.pool.silent(), refused.location) {
		way.next = ""
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(time.Duration(way.random.Int63n(int64(way.pause)) + 1)):
	}
	way.pause = min(2*way.pause, pauseMax)
	return true
}

// act performs an action at one proxy, and parses its answer.
func (pool *Pool) act(ctx context.Context, location, name string, body, answer any) error {
	proxy, err := pool.connect(location)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	stream, err := proxy.DoAction(ctx, &flight.Action{Type: name, Body: text})
	if err != nil {
		return refusalOf(err, nil)
	}
	result, err := stream.Recv()
	if err != nil {
		return refusalOf(err, stream.Trailer())
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(result.Body, answer); err != nil {
		return fmt.Errorf("%s: %s: %w", name, result.Body, err)
	}
	return nil
}
