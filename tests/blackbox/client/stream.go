package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"dlog/blackbox/history"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc/codes"
)

var payloads = arrow.NewSchema(
	[]arrow.Field{{Name: "value", Type: arrow.BinaryTypes.Binary}}, nil)

// wireClaim is a claim as the proxy writes it.
type wireClaim struct {
	Name  string `json:"name"`
	Epoch int64  `json:"epoch"`
	Base  int64  `json:"base"`
	Token string `json:"token"`
}

func (claim wireClaim) parsed() *history.Claim {
	return &history.Claim{
		Producer: claim.Name, Epoch: claim.Epoch, Base: claim.Base, Token: claim.Token}
}

func wire(claim *history.Claim) *wireClaim {
	return &wireClaim{claim.Producer, claim.Epoch, claim.Base, claim.Token}
}

// stream is an open DoPut.
type stream struct {
	location string
	put      flight.FlightService_DoPutClient
	writer   *flight.Writer
	cancel   context.CancelFunc
	sent     int64
	claim    *history.Claim // with a producer
	sequence int64          // from the first reply
}

// answer is a message of the proxy.
type answer struct {
	Ready *struct {
		Producer *wireClaim
		Sequence int64
	}
	Acked    *int64
	Dlsn     string
	Draining *struct{ Location string }
}

// open begins a stream at one proxy and waits until it is ready.
func (pool *Pool) open(
	ctx context.Context, location string, command map[string]any,
) (*stream, error) {
	proxy, err := pool.connect(location)
	if err != nil {
		return nil, err
	}
	silent := slices.DeleteFunc(pool.silent(), func(each string) bool { return each == location })
	if len(silent) > 0 {
		command["unreachable"] = silent
	}
	text, err := json.Marshal(command)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	opened := &stream{location: location, cancel: cancel}
	if opened.put, err = proxy.DoPut(ctx); err != nil {
		cancel()
		return nil, refusalOf(err, nil)
	}
	opened.writer = flight.NewRecordWriter(opened.put, ipc.WithSchema(payloads))
	opened.writer.SetFlightDescriptor(
		&flight.FlightDescriptor{Type: flight.DescriptorCMD, Cmd: text})
	_ = opened.writer.Write(batchOf(nil)) // the schema; if it fails, the first answer says why
	reply, err := opened.receive()
	if err != nil {
		opened.close()
		return nil, err
	}
	if reply.Ready == nil {
		opened.close()
		return nil, fmt.Errorf("the first answer of a stream is not ready: %+v", reply)
	}
	if reply.Ready.Producer != nil {
		opened.claim, opened.sequence = reply.Ready.Producer.parsed(), reply.Ready.Sequence
	}
	return opened, nil
}

func (opened *stream) close() {
	opened.cancel()
}

// receive waits for an answer, but not for ever.
func (opened *stream) receive() (reply answer, err error) {
	late := time.AfterFunc(answerTimeout, opened.cancel)
	defer late.Stop()
	message, err := opened.put.Recv()
	if err != nil {
		if err == io.EOF {
			err = fmt.Errorf("the stream ended: %w", err)
		}
		refused := refusalOf(err, opened.put.Trailer())
		refused.at = opened.location
		if refused.code == codes.Canceled {
			refused.code = codes.DeadlineExceeded
		}
		return reply, refused
	}
	err = json.Unmarshal(message.AppMetadata, &reply)
	return reply, err
}

// append writes records and waits until they are durable; it returns where the last one is, if that
// is reported. isSent says whether the records may still have been written, if there is an error.
func (opened *stream) append(
	values []string, sequence int64, isLast bool,
) (last string, isSent bool, err error) {
	var beside []byte
	if opened.claim != nil {
		beside = fmt.Appendf(nil, `{"sequence": %d}`, sequence)
	}
	isSent = opened.writer.WriteWithAppMetadata(batchOf(values), beside) == nil
	if isSent && isLast {
		_ = opened.put.CloseSend() // if either fails, the next answer says why
	}
	opened.sent += int64(len(values))
	for {
		reply, err := opened.receive()
		if err != nil {
			return "", isSent, err
		}
		if reply.Draining != nil {
			return "", false, &refusal{name: "draining", location: reply.Draining.Location,
				err: fmt.Errorf("the proxy lets go of the log"), code: codes.Unavailable}
		}
		if reply.Acked != nil && *reply.Acked == opened.sent {
			return reply.Dlsn, true, nil
		}
	}
}

func batchOf(values []string) arrow.RecordBatch {
	column := array.NewBinaryBuilder(memory.DefaultAllocator, arrow.BinaryTypes.Binary)
	for _, value := range values {
		column.AppendString(value)
	}
	return array.NewRecordBatch(payloads, []arrow.Array{column.NewArray()}, int64(len(values)))
}
