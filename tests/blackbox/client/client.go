package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"time"

	"dlog/blackbox/history"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc/codes"
)

const (
	patience  = 20 * time.Second // for one operation, over all proxies
	followFor = 200 * time.Millisecond
)

// Client does operations on one log, one after the other, and notes each.
type Client struct {
	pool    *Pool
	log     string
	number  int
	random  *rand.Rand
	clock   func() int64
	streams map[string]*stream // by the token of the claim; that without a producer by ""
	done    []history.Operation
}

// New returns a client.
func New(
	pool *Pool, log string, number int, random *rand.Rand, clock func() int64,
) *Client {
	return &Client{pool: pool, log: log, number: number, random: random, clock: clock,
		streams: map[string]*stream{}}
}

// Close ends all streams, and returns the operations.
func (client *Client) Close() []history.Operation {
	for _, each := range client.streams {
		each.close()
	}
	return client.done
}

// Create makes the log.
func (client *Client) Create(ctx context.Context) error {
	return client.pool.attempts(ctx, client.random, func(location string) error {
		err := client.pool.act(ctx, location, "create", map[string]any{"log": client.log}, nil)
		if refused := (*refusal)(nil); errors.As(err, &refused) && refused.code == codes.AlreadyExists {
			return nil // an answer was lost before
		}
		return err
	})
}

// Release asks the owner to let go of the log; whether it does is not noted.
func (client *Client) Release(ctx context.Context) {
	_ = client.pool.act(ctx, client.pool.pick(client.random), "release",
		map[string]any{"log": client.log}, nil)
}

// perform notes an operation and its outcome. `call` returns first whether what failed may have had
// an effect before the last refusal. That one says that there is none if it is of the log's owner;
// but a producer that is fenced now, or a log that is sealed now, was not when it was first sent.
func (client *Client) perform(
	operation history.Operation, call func(context.Context, *history.Operation) (bool, error),
) history.Operation {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	operation.Client, operation.Call = client.number, client.clock()
	mayHaveEffect, err := call(ctx, &operation)
	operation.Return = client.clock()
	operation.Outcome = history.Done
	if err != nil {
		refused := refusalOf(err, nil)
		operation.Error, operation.Outcome, operation.Rows = refused.name, history.Refused, nil
		if refused.last != "none" {
			operation.Last = refused.last
		}
		if mayHaveEffect && refused.name != history.ConditionFailed {
			operation.Outcome = history.Unknown
		}
		operation.Note += " " + refused.Error()
	}
	client.done = append(client.done, operation)
	return operation
}

// Append appends records, which are one batch. Of a producer they are sent again until it is known
// what became of them; others once.
func (client *Client) Append(operation history.Operation) history.Operation {
	operation.Kind = history.Append
	return client.perform(operation, client.append)
}

func (client *Client) append(
	ctx context.Context, operation *history.Operation,
) (mayHaveEffect bool, err error) {
	err = client.pool.attempts(ctx, client.random, func(location string) error {
		opened, err := client.streamFor(location, operation)
		if err != nil {
			return err
		}
		last, isSent, err := opened.append(
			operation.Values, operation.Sequence, operation.Conditional)
		if err == nil {
			operation.Last = last
			operation.Note += "done at " + opened.location
			if operation.Conditional {
				opened.close()
			}
			return nil
		}
		client.forget(opened)
		refused := *refusalOf(err, nil)
		operation.Note += fmt.Sprintf("sent %v to %s: %s; ", isSent, opened.location, refused.name)
		mayHaveEffect = mayHaveEffect || isSent && refused.mayHaveEffect()
		if isSent && operation.Claim == nil && refused.mayHaveEffect() {
			refused.code = codes.Aborted // not to be sent again
			return &refused
		}
		return err
	})
	return mayHaveEffect, err
}

// streamFor returns the client's open stream, or a new one.
func (client *Client) streamFor(location string, operation *history.Operation) (*stream, error) {
	key, command := "", map[string]any{"log": client.log}
	if operation.Claim != nil {
		key = operation.Claim.Token
		command["producer"] = wire(operation.Claim)
	}
	if operation.Conditional {
		command["expected"] = nil
		if operation.Expected != "" {
			command["expected"] = operation.Expected
		}
		if found := client.streams[key]; found != nil && operation.Claim != nil {
			client.forget(found) // it would not know of the numbers that are used elsewhere
		}
		return client.pool.open(context.Background(), location, command)
	}
	if found := client.streams[key]; found != nil {
		return found, nil
	}
	opened, err := client.pool.open(context.Background(), location, command)
	if err == nil {
		client.streams[key] = opened
	}
	return opened, err
}

func (client *Client) forget(opened *stream) {
	opened.close()
	for key, each := range client.streams {
		if each == opened {
			delete(client.streams, key)
		}
	}
}

// Begin begins an incarnation of a producer: by the action, or by a stream that has its name.
func (client *Client) Begin(producer string) history.Operation {
	begun := history.Operation{Kind: history.Begin, Claim: &history.Claim{Producer: producer}}
	byAction := client.random.Intn(2) == 0
	return client.perform(begun, func(ctx context.Context, operation *history.Operation) (bool, error) {
		mayHaveEffect := false
		err := client.pool.attempts(ctx, client.random, func(location string) error {
			operation.Note = fmt.Sprintf("by action: %v, at %s", byAction, location)
			err := client.beginAt(ctx, location, producer, byAction, operation)
			refused := refusalOf(err, nil)
			if err == nil || !refused.mayHaveEffect() || refused.name == "LogNotReadyError" {
				return err
			}
			mayHaveEffect = true
			refused.code = codes.Aborted // each try may begin another one
			return refused
		})
		return mayHaveEffect, err
	})
}

func (client *Client) beginAt(
	ctx context.Context, location, producer string, byAction bool, operation *history.Operation,
) error {
	if byAction {
		var reply struct {
			Producer wireClaim
			Sequence int64
		}
		err := client.pool.act(ctx, location, "producer_init",
			map[string]any{"log": client.log, "producer": producer}, &reply)
		if err == nil {
			operation.Claim, operation.Sequence = reply.Producer.parsed(), reply.Sequence
		}
		return err
	}
	opened, err := client.pool.open(context.Background(), location,
		map[string]any{"log": client.log, "producer": producer})
	if err != nil {
		return err
	}
	client.streams[opened.claim.Token] = opened
	operation.Claim, operation.Sequence = opened.claim, opened.sequence
	return nil
}

// Seal seals the log.
func (client *Client) Seal() history.Operation {
	sealed := history.Operation{Kind: history.Seal}
	return client.perform(sealed, func(ctx context.Context, _ *history.Operation) (bool, error) {
		mayHaveEffect := false
		err := client.pool.attempts(ctx, client.random, func(location string) error {
			err := client.pool.act(ctx, location, "seal", map[string]any{"log": client.log}, nil)
			refused := refusalOf(err, nil)
			mayHaveEffect = mayHaveEffect || err != nil && refused.mayHaveEffect()
			return err
		})
		return mayHaveEffect, err
	})
}

// Tail asks where the last record is.
func (client *Client) Tail() history.Operation {
	asked := history.Operation{Kind: history.Tail}
	return client.ask(asked, func(ctx context.Context, location string, tail *history.Operation) error {
		var reply struct {
			Last *struct {
				Dlsn        string
				Sequence_id int64
			}
		}
		err := client.pool.act(ctx, location, "positions",
			map[string]any{"log": client.log, "at": []any{}}, &reply)
		if err == nil && reply.Last != nil {
			tail.Last, tail.LastNumber = reply.Last.Dlsn, reply.Last.Sequence_id
		}
		return err
	})
}

// Count asks how many records there are.
func (client *Client) Count() history.Operation {
	asked := history.Operation{Kind: history.Count}
	return client.ask(asked, func(ctx context.Context, location string, count *history.Operation) error {
		info, err := client.info(ctx, location)
		if err == nil {
			count.Count = info.TotalRecords
		}
		return err
	})
}

// ask performs what has no effect. Only the try that succeeded is noted.
func (client *Client) ask(
	operation history.Operation,
	try func(ctx context.Context, location string, operation *history.Operation) error,
) history.Operation {
	return client.perform(operation, func(ctx context.Context, asked *history.Operation) (bool, error) {
		return false, client.pool.attempts(ctx, client.random, func(location string) error {
			asked.Call, asked.Note = client.clock(), location
			trying, cancel := context.WithTimeout(ctx, answerTimeout)
			defer cancel()
			return try(trying, location, asked)
		})
	})
}

func (client *Client) info(ctx context.Context, location string) (*flight.FlightInfo, error) {
	proxy, err := client.pool.connect(location)
	if err != nil {
		return nil, err
	}
	info, err := proxy.GetFlightInfo(ctx,
		&flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{client.log}})
	if err != nil {
		return nil, refusalOf(err, nil)
	}
	return info, nil
}

// Read reads all from a position to before another one; both may be left out.
func (client *Client) Read(start, end string) history.Operation {
	asked := history.Operation{Kind: history.Read, Start: start, End: end}
	return client.ask(asked, func(ctx context.Context, location string, read *history.Operation) error {
		ticket := client.ticket(start, end)
		rows, err := client.get(ctx, location, ticket, -1)
		read.Rows = rows
		return err
	})
}

// ReadParts reads all by the parts in which GetFlightInfo divides the log.
func (client *Client) ReadParts() history.Operation {
	asked := history.Operation{Kind: history.Read}
	return client.ask(asked, func(ctx context.Context, location string, read *history.Operation) error {
		read.Rows, read.Note = nil, "parts "+location
		info, err := client.info(ctx, location)
		if err != nil {
			return err
		}
		for _, part := range info.Endpoint {
			at := location
			if len(part.Location) > 0 {
				at = part.Location[client.random.Intn(len(part.Location))].Uri
			}
			rows, err := client.get(ctx, at, part.Ticket.Ticket, -1)
			if err != nil {
				return err
			}
			read.Rows = append(read.Rows, rows...)
		}
		read.Count = info.TotalRecords
		return nil
	})
}

// Follow reads so many records from a position on, and waits for them a little.
func (client *Client) Follow(start string, count int) history.Operation {
	asked := history.Operation{Kind: history.Follow, Start: start}
	return client.ask(asked, func(ctx context.Context, location string, read *history.Operation) error {
		ticket := client.ticket(start, "")
		ticket = append(ticket[:len(ticket)-1], `, "follow": true}`...)
		ctx, cancel := context.WithTimeout(ctx, followFor)
		defer cancel()
		rows, err := client.get(ctx, location, ticket, count)
		read.Rows = rows
		if err != nil && refusalOf(err, nil).code == codes.DeadlineExceeded {
			return nil // what came is noted
		}
		return err
	})
}

func (client *Client) ticket(start, end string) []byte {
	fields := map[string]any{
		"log": client.log, "columns": []string{"dlsn", "sequence_id", "value"}}
	if start != "" {
		fields["start"] = map[string]any{"dlsn": start}
	}
	if end != "" {
		fields["end"] = map[string]any{"dlsn": end}
	}
	text, err := json.Marshal(fields)
	if err != nil {
		panic(err)
	}
	return text
}

// get returns the rows of a ticket, or, of a ticket that follows, so many of them at least.
func (client *Client) get(
	ctx context.Context, location string, ticket []byte, count int,
) (rows []history.Row, err error) {
	proxy, err := client.pool.connect(location)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := proxy.DoGet(ctx, &flight.Ticket{Ticket: ticket})
	if err != nil {
		return nil, refusalOf(err, nil)
	}
	reader, err := flight.NewRecordReader(stream)
	if err != nil {
		return nil, refusalOf(err, stream.Trailer())
	}
	defer reader.Release()
	for (count < 0 || len(rows) < count) && reader.Next() {
		batch := reader.RecordBatch()
		column := func(name string) int { return batch.Schema().FieldIndices(name)[0] }
		positions := batch.Column(column("dlsn")).(*array.Struct)
		numbers := batch.Column(column("sequence_id")).(*array.Int64)
		values := batch.Column(column("value")).(*array.Binary)
		for at := range int(batch.NumRows()) {
			var position history.Position
			for part := range position { // segment, entry, slot
				position[part] = positions.Field(part).(*array.Int64).Value(at)
			}
			rows = append(rows, history.Row{Position: position.String(),
				Number: numbers.Value(at), Value: string(values.Value(at))})
		}
	}
	if err := reader.Err(); err != nil && err != io.EOF {
		return rows, refusalOf(err, stream.Trailer())
	}
	return rows, nil
}
